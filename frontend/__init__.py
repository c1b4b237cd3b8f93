"""Front end: a body becomes a request, events become an answer, without HTTP. The server and the Python API use it."""
