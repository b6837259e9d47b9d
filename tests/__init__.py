"""Tests, one module per mechanism; run them with ``make test``."""
