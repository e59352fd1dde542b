"""Logging of the daemon: structlog on standard error, text on a terminal and JSON lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog

LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(level: str, form: Literal["auto", "text", "json"]) -> None:
    """Set up structlog for this process and let the libraries that log by themselves do so in the same form."""
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and "NO_COLOR" not in os.environ)
        if text
        else structlog.processors.JSONRenderer()
    )
    before: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*before, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    foreign = logging.StreamHandler(sys.stderr)
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=before,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[foreign], force=True)
