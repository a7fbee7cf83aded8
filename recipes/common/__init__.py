"""Helpers that scripts share: data, tokens, processes, tables and pages."""
