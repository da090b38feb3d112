"""The demo that people show each other: long video and playable worlds in a browser.

`blocks` and the modules that end in `_tab` import gradio; the others hold what can be tested without it.
"""
