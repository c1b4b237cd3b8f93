"""JSON schemas prepared for the grammar engine: references, closed objects, rewritten and dropped keywords."""
