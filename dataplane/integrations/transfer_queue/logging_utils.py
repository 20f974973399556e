"""Loggers as recipes of TransferQueue make them."""

from __future__ import annotations

import logging
import os

_FORMAT = "%(asctime)s - %(levelname)s - %(name)s - %(message)s"


def get_logger(name: str | None, default_level: str = "WARNING") -> logging.Logger:
    """The logger of this name, at the level of $TQ_LOGGING_LEVEL, or else this one. It writes to stderr where nobody
    has said where to: the actors of Ray have no logging of their own."""
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("TQ_LOGGING_LEVEL", default_level))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    return logger
