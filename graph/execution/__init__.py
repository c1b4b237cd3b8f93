"""Running a graph: graph partition, memory planning, compiled plans, sessions, profiling."""
