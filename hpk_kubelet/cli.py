"""`hpk …`: the command line. Every sub-command imports what it needs when it runs."""

from __future__ import annotations

import errno
import os
import sys
import traceback
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
def status(
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait for the API and every node.")
    ] = 0,
) -> None:
    """Show the control job, the API, nodes and pods; exit 1 when it doesn't run."""
    import asyncio

    from hpk_kubelet.controlplane import status as module

    asyncio.run(module.status(Paths(), wait, typer.echo))


@app.command()
def down() -> None:
    """Stop the control job and wait until it has ended. Pods that run go on."""
    from hpk_kubelet.controlplane import status as module

    module.down(Paths(), typer.echo)


@app.command()
def handover() -> None:
    """Move the control plane to a new job, with HPK as it is installed now. Pods go on."""
    from hpk_kubelet.controlplane import status as module

    module.handover(Paths(), typer.echo)


@app.command()
def tunnel(
    port: Annotated[int, typer.Option(help="Of this node; 0: any free one.")] = 0,
) -> None:
    """Lead to the API through the control job, where the site closes its port. Until ^C."""
    import asyncio

    from hpk_kubelet.controlplane import tunnel as module

    asyncio.run(module.tunnel(Paths(), port, typer.echo))


@app.command()
def jobs() -> None:
    """List pods beside their Slurm jobs, recently ended ones included."""
    import asyncio

    from hpk_kubelet.controlplane import status as module

    for line in module.table(asyncio.run(module.list_jobs(Paths()))):
        typer.echo(line)


@app.command()
def doctor() -> None:
    """Try what HPK needs of this site and say what each answer means."""
    from hpk_kubelet.controlplane import doctor as module

    paths = Paths()
    if not module.run(load_config(paths), paths, typer.echo):
        raise typer.Exit(1)


@app.command()
def fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what only the sandbox uses.")
    ] = False,
) -> None:
    """Obtain the components that are not here yet: from a release, or by building them."""
    from hpk_kubelet.controlplane.components import recipes
    from hpk_kubelet.controlplane.fetch import fetch as obtain

    wanted = list(recipes()) if everything else names or []
    for found in obtain(wanted, load_config(Paths()).mirror):
        typer.echo(f"{found.recipe.name} v{found.recipe.version}  {found.path}")


@app.command()
def components(
    path: Annotated[
        str, typer.Option(metavar="NAME", help="Obtain this one and print its path only.")
    ] = "",
) -> None:
    """List the components: version, where each is and where it came from."""
    from hpk_kubelet.controlplane import components as module

    if path:
        from hpk_kubelet.controlplane.fetch import fetch as obtain

        typer.echo(str(obtain([path], load_config(Paths()).mirror)[0].path))
        return
    for recipe in module.recipes().values():
        found = module.find(recipe.name)
        where = f"{found.path}  ({found.origin})" if found else "not here: hpk fetch"
        if found or not recipe.optional:
            typer.echo(f"{recipe.name:<24} v{recipe.version:<8} {where}")


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def image(context: typer.Context) -> None:
    """Pull, list and clean the images that pods run from."""
    from hpk_kubelet.images.cli import app as image_app

    image_app(context.args, prog_name="hpk image")


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
        if isinstance(e, OSError) and e.errno in _SITE:
            print(f"hpk: {_site_words(e)}", file=sys.stderr)
        else:
            text = f"this is a bug: {type(e).__name__}: {e}; {_write_traceback()}"
            print(f"hpk: {text}", file=sys.stderr)
        sys.exit(1)


# What the file system says of itself, not of us.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SITE = (
    *_FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
    *(errno.EIO, errno.ESTALE, errno.ENODEV, errno.EMFILE, errno.ENFILE),
)


def _site_words(error: OSError) -> str:
    """One sentence on a file system that refuses, and what to do about it."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _FULL:
        advice = "make room (hpk image gc), or set HPK_HOME or XDG_CACHE_HOME to another place"
    else:
        advice = "HPK_HOME and XDG_CACHE_HOME say where HPK keeps its files"
    return f"{where}{error.strerror}; {advice}"


def _write_traceback() -> str:
    """Keeps the traceback being handled in hpk.log; says where that is."""
    log = Paths().log / "hpk.log"
    try:
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as f:
            f.write(f"{' '.join(sys.argv)}\n{traceback.format_exc()}\n")
    except OSError as e:
        return f"its details can't be kept in {log}: {e.strerror}"
    return f"the details are in {log}"


if __name__ == "__main__":
    main()
