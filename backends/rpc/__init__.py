"""RPC: a device of another machine (`logitless rpc-server`) as a backend.

The server makes all decisions that depend on its machine. The client sends the nodes of the user's graph;
the server builds them by the ops' own constructors, lets its backend rewrite and fuse them, keeps
the result and returns it, so that the client can lay out memory. Programs name these nodes. Nothing
that is received is run or unpickled. Page tables, cells and row ids are checked before a program
reads them (`indices.py`); other indices of a program (experts, recurrent states, sampling) are not,
so clients with a key must be trusted not to attack the server's memory."""
