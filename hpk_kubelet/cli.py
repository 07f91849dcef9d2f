"""`hpk …`: the command line. Every sub-command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from hpk_kubelet.config import Paths, load_config
from hpk_kubelet.errors import HPKError

app = typer.Typer(
    name="hpk",
    help="A Kubernetes of your own on a Slurm cluster: every pod is a Slurm job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    control_plane_only: Annotated[
        bool, typer.Option(help="Start neither the kubelet nor HPK's controllers.")
    ] = False,
) -> None:
    """Run the control plane until SIGTERM; hpk.sbatch does this in a job."""
    from hpk_kubelet.controlplane import serve as module

    paths = Paths()
    module.main(load_config(paths), paths, () if control_plane_only else module.OWN)


@app.command()
def kubelet() -> None:
    """Run the virtual kubelet (hpk serve starts it)."""
    from hpk_kubelet.node.main import run

    run()


@app.command()
def controllers() -> None:
    """Run the scheduler and the other controllers (hpk serve starts them)."""
    from hpk_kubelet.controllers.main import run

    run()


def main() -> None:
    """The entry point: what goes wrong is one line on stderr and exit code 1."""
    try:
        app(standalone_mode=True)
    except HPKError as e:
        print(f"hpk: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("hpk: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # hpk … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as e:
        log = _write_traceback()
        print(
            f"hpk: this is a bug: {type(e).__name__}: {e}; the details are in {log}",
            file=sys.stderr,
        )
        sys.exit(1)


def _write_traceback() -> Path:
    log = Paths().log / "hpk.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as f:
        f.write(f"{' '.join(sys.argv)}\n{traceback.format_exc()}\n")
    return log


if __name__ == "__main__":
    main()
