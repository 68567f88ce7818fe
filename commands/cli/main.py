"""The command line: what trains, ``gradbus demo | controller | client | aggregator | worker | run``, and all others.

What is imported here decides how long ``gradbus --help`` takes; torch and DDS are imported inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import gradbus
from gradbus.commands.choices import DATA_HELP, PARTITION_HELP, CodecName, LogLevel
from gradbus.commands.cli import data, flower, inspection, keys, relay, service, settings
from gradbus.commands.cli.options import (
    Bind,
    Config,
    DataRoot,
    Domain,
    FullTraceback,
    Insecure,
    Level,
    Live,
    Loop,
    MetricsPort,
    Mlflow,
    Overrides,
    Resume,
    RunDir,
    Style,
    TensorBoard,
    Wandb,
    add_current_directory_to_path,
    command,
)
from gradbus.commands.lifecycle import guard, run_loop
from gradbus.commands.overrides import Trackers, settings_of
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.names import check_name

app = typer.Typer(
    name="gradbus",
    help="Train one model across machines over a DDS data bus.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the default would take [brackets] for markup, and keep the line ends of docstrings
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"gradbus {gradbus.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command()
@command("demo")
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = 5,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 2,
    samples: Annotated[int, typer.Option(min=0, help="Samples per client and round; 0: all of the client.")] = 2000,
    data: Annotated[str, typer.Option(help=DATA_HELP)] = "auto",
    codec: Annotated[CodecName, typer.Option(help="Codec of the clients' updates.")] = "fp32",
    downlink_codec: Annotated[CodecName, typer.Option(help="Codec of the global model.")] = "fp32",
    partition: Annotated[str, typer.Option(help=PARTITION_HELP)] = "iid",
    seed: Annotated[int, typer.Option(min=0, max=0x7FFF_FFFF, help="Seed of everything random.")] = 0,
    domain: Domain = 0,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    live: Live = True,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Train on this machine: a controller and its clients, each a process of its own, over DDS."""
    from gradbus.commands.run.commands import demo_run
    from gradbus.commands.run.console import Screen
    from gradbus.commands.run.demo import DemoOptions

    add_current_directory_to_path()
    own = settings_of(overrides, trackers=Trackers(tensorboard, mlflow, wandb))
    options = DemoOptions(
        rounds=rounds,
        clients=clients,
        samples=samples,
        data=data,
        data_root=data_root,
        codec=codec,
        downlink_codec=downlink_codec,
        partition=partition,
        seed=seed,
        domain=domain,
        run_dir=run_dir,
        overrides=tuple(own),
        loop=loop,
        level=log_level,
        full_traceback=full_traceback,
    )
    demo_run(options, Screen(live=live, level=log_level))


@app.command()
@command("controller")
def controller(
    config: Config,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    metrics_port: MetricsPort = None,
    resume: Resume = None,
    live: Live = True,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Run the rounds of a job: wait for its clients, average their updates, publish the model."""
    from gradbus.commands.run.commands import controller_run
    from gradbus.commands.run.console import Screen

    add_current_directory_to_path()
    own = settings_of(
        overrides,
        resume=("federated.checkpoint.resume", resume),
        run_dir=run_dir,
        trackers=Trackers(tensorboard, mlflow, wandb),
        metrics_port=metrics_port,
        insecure=insecure,
    )
    own += ["upstream.bus.insecure=true"] if insecure else []  # a site has two buses
    controller_run(config, own, data_root, Screen(live=live, level=log_level, style=log_style), loop)


@app.command()
@command("client")
def client(
    config: Config,
    client_id: Annotated[
        int | None,
        typer.Option(
            "--id", min=0, help="Id of this client, another one for each client of the job.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Name of this client, another one for each client of the job; without --id the controller assigns its "
            "id. With security 'identity' it is that of the node, as the allow list has it, by default.",
        ),
    ] = "",
    metrics_port: MetricsPort = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Train on this machine's own data whenever the controller of the job asks for it."""
    from gradbus.commands.buses import check
    from gradbus.commands.files import ClientFile, load
    from gradbus.runtime import logs

    logs.configure(level=log_level, style=log_style)
    add_current_directory_to_path()
    own = settings_of(overrides, metrics_port=metrics_port, insecure=insecure)
    own += ["client.full_traceback=true"] if full_traceback else []
    file = load(ClientFile, config, overrides=own, data_root=data_root)
    check(file.bus)
    if client_id is None and not name and file.bus.security != "identity":
        raise ConfigError("which client is this? Name it, as in --name site-1, or give it an id, as in --id 0")
    check_name(name) if name else None
    from gradbus.commands.run.federated import run_client

    run_loop(lambda: run_client(file, client_id, name), loop)


Processes = Annotated[
    int,
    typer.Option(
        min=0, max=1024, help="Processes that train; 0: one for each core of this machine, or of Ray's cluster."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        show_default=False,
        help="Train on a Ray cluster: HOST:PORT, auto (that of this machine), or local (one is started for this run).",
    ),
]
Gpus = Annotated[float, typer.Option(min=0, help="With --ray: GPUs, or a share of one, for each training process.")]


@app.command()
@command("virtual")
def virtual(
    config: Config,
    clients: Annotated[int, typer.Option(min=1, max=65_536, help="Clients, with ids from 0.", show_default=False)],
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of the clients that trains in a round, at random. [default: as federated.selection says]",
            show_default=False,
        ),
    ] = None,
    processes: Processes = 0,
    ray: RayAddress = None,
    gpus: Gpus = 0.0,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    metrics_port: MetricsPort = None,
    resume: Resume = None,
    live: Live = True,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """A controller and thousands of virtual clients on this machine, which a few processes train in turn.

    CONFIG is that of a controller. The models have the bits of a run whose clients are processes of their own.
    """
    from gradbus.commands.run.commands import VirtualOptions, controller_run
    from gradbus.commands.run.console import Screen

    add_current_directory_to_path()
    screen = Screen(live=live, level=log_level, style=log_style)
    own = settings_of(
        overrides,
        resume=("federated.checkpoint.resume", resume),
        run_dir=run_dir,
        trackers=Trackers(tensorboard, mlflow, wandb),
        clients=clients,
        metrics_port=metrics_port,
    )
    options = VirtualOptions(clients, fraction, processes, ray, gpus, full_traceback)
    controller_run(config, own, data_root, screen, loop, virtual=options)


@app.command()
@command("host")
def host(
    config: Config,
    ids: Annotated[
        str, typer.Option(metavar="IDS", help="Ids of its clients, as in 0-999 or 0,3-7,12.", show_default=False)
    ],
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of its clients: client 7 of lab is lab.7.", show_default=False)
    ] = "",
    processes: Processes = 0,
    ray: RayAddress = None,
    gpus: Gpus = 0.0,
    metrics_port: MetricsPort = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Many clients of a job as one process of the network: a few processes of this machine train them in turn.

    CONFIG is that of a client. Several machines may each have a part of the ids.
    """
    from gradbus.commands.buses import check
    from gradbus.commands.files import ClientFile, load
    from gradbus.runtime import logs

    logs.configure(level=log_level, style=log_style)
    add_current_directory_to_path()
    own = settings_of(overrides, metrics_port=metrics_port, insecure=insecure)
    own += ["client.full_traceback=true"] if full_traceback else []
    file = load(ClientFile, config, overrides=own, data_root=data_root)
    check(file.bus)
    from gradbus.commands.run.virtual import host_run, pool_options

    host_run(file, ids, pool_options(processes, ray, gpus), lambda main: run_loop(main, loop), name=name)


@app.command()
@command("aggregator")
def aggregator(
    config: Config,
    insecure: Insecure = False,
    overrides: Overrides = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Add the gradients of data-parallel jobs in their network, so that each worker sends its own once."""
    from gradbus.commands.run.commands import aggregator_run
    from gradbus.commands.run.console import Screen

    aggregator_run(
        config, settings_of(overrides, insecure=insecure), Screen(live=False, level=log_level, style=log_style), loop
    )


@app.command()
@command("worker")
def worker(
    config: Config,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of this process, from 0. [default: the file, $GRADBUS_RANK, $RANK, srun, mpirun]"),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Ranks in all. [default: the file, $GRADBUS_WORLD, $WORLD_SIZE, $WORLD, srun, mpirun]"),
    ] = None,
    job_name: Annotated[
        str | None,
        typer.Option(
            metavar="JOB", help="worker, chief or ps, as in TensorFlow, in place of --rank. [default: $TF_CONFIG]"
        ),
    ] = None,
    task_index: Annotated[
        int | None, typer.Option(metavar="I", help="Number of this process among those of its job name, from 0.")
    ] = None,
    join: Annotated[
        bool, typer.Option("--join", help="Join an elastic run that goes on, with a rank that no running process has.")
    ] = False,
    run_dir: RunDir = None,
    tensorboard: TensorBoard = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    metrics_port: MetricsPort = None,
    resume: Resume = None,
    live: Live = True,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="Least important level that is logged. [default: info; warning for rank 0, which reports each epoch]"
        ),
    ] = None,
    bind: Bind = "auto",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Train as one rank of a data-parallel job: the same model on every rank, each with its part of the data.

    One process per rank, on one machine or on several. Rank 0 reports the progress.
    """
    from gradbus.commands.run.commands import PlaceOptions, worker_run
    from gradbus.commands.run.console import Screen

    add_current_directory_to_path()
    own = settings_of(
        overrides,
        resume=("parallel.checkpoint.resume", resume),
        run_dir=run_dir,
        trackers=Trackers(tensorboard, mlflow, wandb),
        metrics_port=metrics_port,
        insecure=insecure,
    )
    screen = Screen(live=live, level=log_level, style=log_style)
    place = PlaceOptions(rank, world, job_name, task_index, join)
    worker_run(config, place, own, data_root, screen, loop, bind)


@app.command()
@command("parameter-server")
def parameter_server(
    config: Config,
    index: Annotated[
        int | None, typer.Option(min=0, help="Number of this server, from 0. [default: that of $TF_CONFIG]")
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(help="Workers in all. [default: the file, $GRADBUS_WORLD, $WORLD_SIZE, $WORLD, srun, mpirun]"),
    ] = None,
    run_dir: RunDir = None,
    resume: Resume = None,
    insecure: Insecure = False,
    overrides: Overrides = None,
    data_root: DataRoot = None,
    log_level: Level = "info",
    log_style: Style = "auto",
    loop: Loop = "uvloop",
    full_traceback: FullTraceback = False,
) -> None:
    """Hold a part of the weights of a data-parallel job, and change it by the gradients that its workers push.

    One process per server, with the configuration of the workers.
    """
    from gradbus.commands.run.commands import server_run
    from gradbus.commands.run.console import Screen

    add_current_directory_to_path()
    own = settings_of(overrides, resume=("parallel.checkpoint.resume", resume), run_dir=run_dir, insecure=insecure)
    server_run(config, index, world, own, data_root, Screen(live=False, level=log_level, style=log_style), loop)


# What follows CONFIG is for the ranks, also without "--".
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|SCRIPT",
            help="CONFIG and further options, as for gradbus worker; or a script or -m MODULE, and its arguments.",
            show_default=False,
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", metavar="N", help="Ranks. [default: world in CONFIG]")
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, metavar="SECONDS", help="Between the request to end and the kill.")
    ] = 5.0,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            show_default=False,
            help="Ranks may die, join and leave: training goes on with MIN to MAX of them. Ranks that are killed are "
            "started again. [default of -n: MAX]",
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="With --elastic: how often ranks are started again in all.")
    ] = 10,
) -> None:
    """Start all ranks of a data-parallel job on this machine, and end them together.

    For example: gradbus run -n 4 -- my.json --set parallel.epochs=3

    A script gets RANK, WORLD_SIZE and so on in its environment, as from torchrun: gradbus run -n 4 -- train.py

    Each line of a rank comes with [rank R] before it. Ctrl-C is passed on, the second one kills. Where a rank fails,
    the others are ended, and its last lines are shown again.

    A job without a name in CONFIG (bus.job) gets one of its own, so that two launches do not disturb each other. The
    ranks share the cores of the machine, unless task.threads sets the number of threads of each; --bind, behind CONFIG,
    says whether each gets cores of its own.
    """

    def load() -> None:  # gradbus-core alone does not have it
        import gradbus.commands.launch.command  # noqa: F401 - a package that is missing is one line

    if missing := guard("run", load):
        raise typer.Exit(missing)
    from gradbus.commands.launch.script import is_script, launch_script

    if is_script(arguments):

        def launch_one() -> int:
            from gradbus.commands.launch.command import ElasticLaunch

            bounds = None if elastic is None else ElasticLaunch.parse(elastic, restarts=restarts)
            return launch_script(arguments, ranks=ranks, grace_s=grace_s, elastic=bounds)

        raise typer.Exit(guard("run", launch_one))
    worker_command = context.parent.command.get_command(context, "worker")  # type: ignore[union-attr]
    parsed = worker_command.make_context("worker", list(arguments), parent=context.parent)  # complains here, once

    def launch() -> int:
        from gradbus.commands.launch.command import ElasticLaunch, launch_run

        add_current_directory_to_path()
        bounds = None if elastic is None else ElasticLaunch.parse(elastic, restarts=restarts)
        return launch_run(arguments, parsed.params, ranks=ranks, grace_s=grace_s, elastic=bounds)

    raise typer.Exit(guard("run", launch))


@app.command(context_settings={"allow_interspersed_args": False})
@command("lab")
def lab(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="For every host; or one for each, with + between.", show_default=False),
    ],
    hosts: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, metavar="N", help="Hosts. [default: 2, or one for each command]", show_default=False
        ),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of each host's link, each way: 10mbit, 1gbit. [default: any]")
    ] = None,
    delay: Annotated[str, typer.Option(help="From one host to another, one way: 50ms.")] = "0",
    jitter: Annotated[str, typer.Option(help="By so much the delay varies: 5ms.")] = "0",
    loss: Annotated[str, typer.Option(help="Share of packets that are lost on the way: 1%.")] = "0",
    queue: Annotated[str, typer.Option(help="What waits in front of a link; more is lost: 64kb.")] = "64mb",
    mtu: Annotated[int, typer.Option(help="Bytes of the largest packet.")] = 1500,
    seed: Annotated[int, typer.Option(help="Of what is lost.")] = 1,
    nat: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65_535,
            show_default=False,
            help="Let the hosts reach this port of the first host only, and nobody reach them, as behind address "
            "translation. [default: all reach all]",
        ),
    ] = None,
) -> int:
    """Run commands on hosts of a network with this rate, delay and loss, all of them on this machine.

    For example: gradbus lab --rate 50mbit --delay 50ms --loss 1% -- make run-ddp

    The command is started once on each host, as on as many machines: with RANK and WORLD_SIZE, with MASTER_ADDR, and
    with the settings of the bus for this network. At the end come time, bytes and the use of the links, host by host.
    Linux alone can do it, with the right to make network namespaces.

    With --nat 443 the bus of the first host listens on that port, and the others dial it. Or the first host has a
    relay: gradbus lab --nat 443 -- gradbus relay + gradbus controller A.json + gradbus client B.json --id 0
    """
    from gradbus.commands.lab import conditions
    from gradbus.commands.lab.command import run_lab

    link = conditions.LinkConditions(
        rate_bit_s=None if rate is None else conditions.bits_per_second(rate),
        delay_s=conditions.seconds(delay),
        jitter_s=conditions.seconds(jitter),
        loss=conditions.share(loss),
        queue_bytes=conditions.num_bytes(queue),
        mtu=mtu,
        seed=seed,
    )
    return run_lab(arguments, hosts, link, nat)


@app.command()
@command("simulate")
def simulate(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures there as CSV.", show_default=False)
    ] = None,
) -> None:
    """Simulate steps of data-parallel training on a network of hosts and racks, for worlds of 2 to 1,024 ranks.

    One process on this machine, and no network. It needs the package simpy, of the extra gradbus[simulate].
    """
    from gradbus.commands.simulate.command import run
    from gradbus.commands.simulate.settings import read_simulation

    add_current_directory_to_path()
    run(read_simulation(config, overrides or ()), out)


for _commands in (inspection, settings, keys, relay, service, flower, data):
    _commands.add_to(app)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
