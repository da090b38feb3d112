"""The command line, run in an empty folder."""

from __future__ import annotations

import logging

import pytest

from vidgen.cli.main import main


@pytest.fixture
def run(capfd, monkeypatch, tmp_path):
    """Runs the command line in an empty folder; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIDGEN_DEBUG", raising=False)
    # Log handlers of libraries hold the stderr of the test that imported them first, which is closed by now.
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run
