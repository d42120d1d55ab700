"""The OpenAI-compatible HTTP server; needs `pip install 'nanovllm[server]'`."""
