"""Worker processes that never import the caller's main module.

multiprocessing imports the main module into every worker, to find functions that were defined
there. A script without `if __name__ == "__main__"` would then run again in each worker. Our workers
run functions of modules only, so they do not need it.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from typing import Any

_OF_MAIN = ("init_main_from_name", "init_main_from_path")


class _Popen(popen_forkserver.Popen):
    """A process start like the library's, without the name of the main module."""

    def _launch(self, process_obj: Any) -> None:
        prepared = spawn.get_preparation_data(process_obj.name)
        for name in _OF_MAIN:
            prepared.pop(name, None)
        sent = io.BytesIO()
        set_spawning_popen(self)
        try:
            for each in (prepared, process_obj):
                reduction.dump(each, sent)
        finally:
            set_spawning_popen(None)
        _forget_lost_server()
        self.sentinel, to_child = forkserver.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        kept = os.dup(to_child)  # the child ends when its other end is closed
        closing = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, closing, (kept, self.sentinel))
        with os.fdopen(to_child, "wb") as stream:
            stream.write(sent.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class WorkerProcess(ForkServerProcess):
    """A process of the fork server that does not import the main module."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  the library's name
        return _Popen(process_obj)


def _forget_lost_server() -> None:
    """Make the library start another fork server if the one it knows is not our child.

    After os.fork() it is the parent's; with SIGCHLD ignored, or a caller that waits for any child,
    it may be gone. The library would raise ChildProcessError.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001  there is no public way
    if server._forkserver_pid is None:  # noqa: SLF001  as above
        return
    try:
        os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: SLF001  as above
    except ChildProcessError:
        with suppress(OSError):
            os.close(server._forkserver_alive_fd)  # noqa: SLF001  as above
        server._forkserver_address = server._forkserver_alive_fd = None  # noqa: SLF001  as above
        server._forkserver_pid = None  # noqa: SLF001  as above
