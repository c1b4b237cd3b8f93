"""Every case of every op on oclgrind, a simulated OpenCL device (`scripts/oclgrind`).

A simulated device takes seconds for what others do in microseconds, so pytest does not collect this
file. Both kinds of OpenCL devices are simulated: lanes as vectors, and lanes as threads, where data
races could occur.
"""

from __future__ import annotations

import sys

from logitless.backends.gpu.language.dialect import CPU, SIMT
from logitless.backends.opencl.backend import OpenCLBackend
from logitless.backends.opencl.programs import OPTIONS, Programs
from logitless.graph.op import OPS
from logitless.graph.testing.conformance import OK, UNSUPPORTED, problems, register_all, run


def main(names: list[str]) -> int:
    """Print each op's outcome; 1 if any is wrong."""
    register_all()
    # optimised code calls functions that oclgrind lacks
    OPTIONS.extend(["-DSIMULATED", "-cl-opt-disable"])
    backend, failed = OpenCLBackend("opencl:0"), False
    print(f"on {backend.device.description}", flush=True)
    for shape in (CPU, SIMT):
        backend.shape = shape
        backend.programs = Programs(backend._context, backend.identity, shape)
        for name in names or sorted(name for name in OPS if OPS[name].cases):
            outcomes = [run(problem, [backend]) for problem in problems(name)]
            wrong = [o for o in outcomes if o.status not in (OK, UNSUPPORTED)]
            failed |= bool(wrong)
            n_run = sum(o.status != UNSUPPORTED for o in outcomes)
            print(f"{shape.name} {name}: {n_run - len(wrong)} of {n_run} cases right", flush=True)
            for o in wrong:
                print(f"  {o.case}: {o.detail}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
