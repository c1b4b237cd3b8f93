"""A device of another machine: `logitless rpc-server` there, a backend like any other here.

The server decides whatever depends on its machine. The client sends the nodes of the user's graph;
the server builds them by the ops' own constructors, lets its backend rewrite and fuse them, keeps
the result and returns it, so that the client can lay out memory. Programs name these nodes. Nothing
that is received is run or unpickled, but kernels trust the numbers (block tables, ids) that they
are fed: both machines must trust each other.
"""
