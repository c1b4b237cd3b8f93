"""A device of another machine: `logitless rpc-server` there, a backend like any other here.

Whatever depends on the machine is decided there. A plan's nodes are sent as the user's graph has them; the server makes
them through the ops' own constructors, lets its backend rewrite and fuse them, keeps what comes out, and tells it, so
that memory can be laid out here. Programs are then named by these nodes. Nothing that is received is ever run or
unpickled, but kernels trust the numbers (page tables, ids) that they are fed: this is for machines that trust each
other.
"""
