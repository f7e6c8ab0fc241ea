"""`tracefp4 store`: serve a directory of records to other hosts, make a key, and check what a directory holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracefp4.cli.options import JsonOption

if TYPE_CHECKING:
    from tracefp4.store.inspection import StoreReport

EXIT_DAMAGED = 1
MIB = 1 << 20
SHOWN = 20

store = typer.Typer(
    no_args_is_help=True,
    help="Keep the records of runs: serve a directory to other hosts, make a key for that, or check every checksum.",
)


@store.command("serve")
def serve(
    path: Annotated[Path, typer.Argument(help="Directory of the store, made if absent.", file_okay=False)],
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDRESS", help="Where to listen; port 0 lets the system choose.")
    ] = "tcp://127.0.0.1:5555",
    when_full: Annotated[
        str,
        typer.Option(
            "--when-full",
            metavar="wait|drop_trajectory",
            help="When the disk cannot keep up: clients wait, or whole trajectories lose their guidance.",
        ),
    ] = "wait",
    max_queue_mb: Annotated[
        float, typer.Option("--max-queue-mb", help="Records that wait for the disk, at most, in MiB.", min=1)
    ] = 256.0,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="Key file that clients must have too; needed where other hosts reach ADDRESS."
        ),
    ] = None,
) -> None:
    """Serve a directory of records until Ctrl-C.

    Runs on other hosts name it in their recipe, as store =
    "tcp://HOST:5555" of the table records. Each run's trajectories get the run's own prefix, so
    several runs may share one server, and each removes only its own. What a
    client was told is finished is on the disk; everything else is lost,
    counted and named by the client, if the server is killed. Whoever has the
    key file may read, write and remove; without one, only this host is served.
    """
    import signal

    from tracefp4.errors import ConfigError
    from tracefp4.store.backends import open_directory
    from tracefp4.store.pending import WriterOptions
    from tracefp4.store.protocol import POLICIES

    if when_full not in POLICIES:
        raise ConfigError(
            f"--when-full: got {when_full!r}; allowed: {', '.join(POLICIES)}. With wait nothing is lost."
        )
    try:
        from tracefp4.store.keys import read_key
        from tracefp4.store.server import StoreServer
    except ModuleNotFoundError as error:
        raise _without_zmq(error) from error
    held = None if key is None else read_key(key)
    options = WriterOptions(policy=when_full, max_queue_bytes=int(max_queue_mb * MIB))
    local = open_directory(path, options=options)
    try:
        server = StoreServer(local, bind=bind, key=held, report=lambda text: typer.echo(text, err=True))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        typer.echo(
            f"serving {path} at {server.address}, {len(local.reader.trajectories())} trajectories; Ctrl-C stops"
        )
        try:
            server.serve()
        except KeyboardInterrupt:
            server.stop()
        found = server.stats
        typer.echo(
            f"{found.requests} requests, {found.repeated} asked again, {found.refused} refused; "
            f"{found.sessions_expired} clients forgotten, {found.faults} faults"
        )
    finally:
        local.close()


@store.command("key")
def key(
    path: Annotated[Path, typer.Argument(help="New file, which only you may read.", dir_okay=False)],
) -> None:
    """Write a new key for a store server and its clients.

    Copy the file to the hosts of both, over a channel that you trust. Give it
    to the server as --key, and name it in each recipe as key of the table
    records. Both ends then prove that they hold it, and what travels is
    encrypted. There are no accounts: whoever has the file may do everything.
    """
    try:
        from tracefp4.store.keys import write_key
    except ModuleNotFoundError as error:
        raise _without_zmq(error) from error
    write_key(path)
    typer.echo(f"wrote {path}; give it to the server (--key) and to its clients (key in [records])")


def _without_zmq(error: ModuleNotFoundError) -> Exception:
    from tracefp4.errors import ConfigError

    return ConfigError(
        f"A store server needs pyzmq; got {error}. Records can also stay in a run's directory. Install it: "
        "pip install 'tracefp4[transport]'."
    )


@store.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="Directory of a store.", exists=True, file_okay=False)],
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="First write a lost or damaged manifest anew, from the chunks."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a store, check every checksum, and name what is damaged.

    Trajectories that nobody finished are listed; they are what a killed run
    leaves. A torn end of a file is no damage: no finished trajectory lies
    there. The exit code is 1 when something that was written does not verify;
    a trainer rounds those positions to nearest and counts them. Nothing is
    changed, except the manifest with --rebuild.
    """
    import json
    from dataclasses import asdict

    from tracefp4.store.inspection import check_store, rebuild_manifest

    restored = rebuild_manifest(path) if rebuild else ()
    found = check_store(path)
    if as_json:
        content = asdict(found) | {"is_intact": found.is_intact, "restored": list(restored)}
        typer.echo(json.dumps(content, indent=2))
    else:
        for line in _lines(found, restored=restored if rebuild else None):
            typer.echo(line)
    if not found.is_intact:
        raise typer.Exit(EXIT_DAMAGED)


def _lines(found: "StoreReport", *, restored: tuple[str, ...] | None) -> list[str]:
    lines = [
        f"{found.num_finished} trajectories finished, {len(found.unfinished)} not; "
        f"{found.num_bytes / MIB:.1f} MiB in chunks"
    ]
    if restored is not None:
        lines.append(f"manifest written anew: {len(restored)} trajectories restored")
    lines += _listed("not finished: ", list(found.unfinished))
    lines += _listed(
        "lost: ",
        [f"{s.trajectory} column {s.column} rows {s.start}..{s.stop - 1}, {s.reason}" for s in found.lost],
    )
    gaps = [
        f"{gap.file} bytes {gap.start}..{gap.stop - 1}{', a torn end' if gap.is_tail else ''}"
        for gap in found.damaged
    ]
    lines += _listed("no frame: ", gaps)
    lines += _listed("refused: ", list(found.refused))
    return [*lines, "intact" if found.is_intact else "damaged"]


def _listed(label: str, items: list[str]) -> list[str]:
    more = [f"{label}... and {len(items) - SHOWN} more (--json lists all)"] if len(items) > SHOWN else []
    return [label + item for item in items[:SHOWN]] + more
