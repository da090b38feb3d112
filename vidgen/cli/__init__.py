"""The `vidgen` command: one file per sub-command. Heavy packages are imported inside the commands that need them."""
