"""KV events: which blocks the prefix cache has, published for routers (vLLM's messages over ZMQ)."""
