"""Vision: projector files (mmproj), image preprocessing, the vision encoder's graph."""
