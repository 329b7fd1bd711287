"""A peer in processes of its own: started, asked for server steps, and ended."""

import contextlib
import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import Any

import workload

START, TURN, END = 300, 900, 20  # seconds that a peer may take to begin, for one turn, and to end


class Peer:
    """Several processes of one program that work together; the first of them talks to us."""

    def __init__(self, program: list[str], environments: list[dict[str, str]], log: Path) -> None:
        self._program = program
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._all = []
        with log.open("w") as errors:
            for place, environment in enumerate(environments):
                child = subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL if place else subprocess.PIPE,
                    stdout=errors if place else subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | environment,
                )
                self._all.append(child)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._hear("ready", START)

    @property
    def processes(self) -> list[int]:
        return [child.pid for child in self._all]

    def turn(self, steps: int) -> float:
        self._say(steps)
        return float(self._hear("seconds", TURN))

    def accuracy(self) -> float:
        return float(self._hear("accuracy", TURN))

    def close(self) -> None:
        """Ask them to end; end them if they do not."""
        with contextlib.suppress(OSError):
            self._say(0)
        for child in self._all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END)
            child.kill()
            child.wait()
        first = self._all[0]
        assert first.stdin
        assert first.stdout
        with contextlib.suppress(OSError):
            first.stdin.close()
        self._reader.join(END)
        if not self._reader.is_alive():  # else somebody that it started still holds the pipe
            first.stdout.close()

    def _say(self, steps: int) -> None:
        pipe = self._all[0].stdin
        assert pipe
        pipe.write(f"{steps}\n")
        pipe.flush()

    def _read(self) -> None:
        pipe = self._all[0].stdout
        assert pipe
        for line in pipe:
            self._lines.put(line)
        self._lines.put("")

    def _hear(self, name: str, limit: float) -> Any:
        """The next fact of that name."""
        while True:
            try:
                line = self._lines.get(timeout=limit)
            except queue.Empty:
                self._fail(f"said nothing for {limit} s")
            if not line:
                self._fail("ended early")
            facts = workload.heard(line)
            if facts and name in facts:
                return facts[name]

    def _fail(self, what: str) -> None:
        self.close()
        tail = "\n".join(self._log.read_text().splitlines()[-15:])
        raise SystemExit(f"{' '.join(self._program[:2])} {what}:\n{tail}")
