"""HTTP handlers of all endpoints, and the conversion of results to replies."""
