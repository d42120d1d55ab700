"""Watching an engine: live in a browser, or recorded and replayed."""
