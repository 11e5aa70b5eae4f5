"""Runs on several ranks, as processes on the emulated device: the numbers of one rank, the same
bits at every ZeRO stage and stream order, checkpoints for any number of ranks, and clean ends."""

import socket, threading

import program
from files import *

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]

# A small model with C = 80, so that shards of 3 ranks end within a kernel's block; T below 16. Its
# one head keeps the emulated attention cheap.
ODD = "-i train.bin -j val.bin -e l3h1c80t16 -t 12 -b 2 "
PORT = 10000 + os.getpid() % 10000  # not in the range of ports that the system assigns


def train(arguments, folder, **env):
    shutil.rmtree(folder, ignore_errors=True)
    succeeds("--quiet -o %s %s" % (folder, arguments), env=env)


def numbers(folder):
    return [x for key in ("loss", "grad_norm", "val_loss") for x in series(key, folder)]


def same(a, b, steps):
    """Two runs have the same bits: numbers, weights and moments."""
    assert numbers(a) and numbers(a) == numbers(b), (a, b)
    assert training_state(steps, a) == training_state(steps, b), (a, b)


def start_ranks(arguments, variables, more=("", "", ""), under=("", "", "")):
    """Starts one process for each dictionary of variables, as a launcher would."""
    return [start(arguments + " " + more[i], env=env, under=under[i])
            for i, env in enumerate(variables)]


def outcomes(processes):
    ended = [(*p.communicate(timeout=LIMIT_S), p.returncode) for p in processes]
    return [Outcome(status, out, err) for out, err, status in ended]


def torchrun(rank, ranks, **more):
    return {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), **more}


def children(process):
    return [*map(int, Path("/proc/%d/task/%d/children" % ((process.pid,) * 2)).read_text().split())]


def start_long(more="", ranks=3, **env):
    """Starts a long run that hangs as on GPUs, and waits until it trains; returns it, its ranks."""
    process = start(ODD + "-d %d --gpus %d -z 1 -k constant -x 100000 --quiet -o out %s"
                    % (24 * ranks, ranks, more), env={"EMU_NCCL_HANG": "1", **env})
    wait_until(lambda: Path("out/log.jsonl").exists() and len(log_steps()) >= 2)
    pids = children(process)
    assert len(pids) == ranks
    return process, pids


def ends(process, *expected):
    """The run fails, and says why."""
    err = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 1, err
    for text in expected:
        assert text in err
    return err


def gone(pid):
    try:
        return Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def none_left(pids):
    wait_until(lambda: all(gone(pid) for pid in pids))


# Numbers.

@pytest.mark.parametrize("counts,tokens,options,tolerance", [
    ("1234", 288, "--dtype fp32 -x 3 -l 3e-3", 1e-6), ("1234", 288, "-x 2 -l 3e-3", 5e-3),
    ("128", 192, "--dtype fp32 -x 3 -l 3e-3 --optimizer muon", 1e-6),
    ("15", 960, "--dtype fp32 -x 2 -l 3e-3 --optimizer muon", 1e-6),
    ("17", 1344, "--dtype fp32 -x 2 -l 3e-3 --optimizer muon", 1e-6),
    ("1234", 288, "--dtype fp16 -x 2 -l 0", 5e-3)])
def test_numbers(counts, tokens, options, tolerance):
    """Several ranks have the numbers of one rank up to rounding, 1e-6 in fp32, and, with a learning
    rate of 0, the same validation loss to the bit. In fp16 each rank scales its loss. On 5 and 7
    ranks, which share no matrix evenly, Muon has groups of two blocks."""
    line = ODD if tokens < 900 else ODD.replace("l3h1c80t16 -t 12 -b 2", "l4h1c16t16 -t 12 -b 16")
    for ranks in counts:
        train(line + "-d %d -v 1 -m 7 %s --gpus %s" % (tokens, options, ranks), "out" + ranks)
        want, got = numbers("out1"), numbers("out" + ranks)
        assert len(want) == len(got) >= 5
        assert all(abs(a - b) <= tolerance * a for a, b in zip(want, got)), ranks
        if "-l 0" in options:
            assert want[-1] == got[-1]


STAGES = [(3, 1, ""), (2, 3, "--optimizer muon --moments bf16 -w none"), (3, 3, "-r block"),
          (2, 1, "--grad-dtype fp32 -l 100 -c 1"), (3, 1, "--dtype fp16 --optimizer muon")]


@pytest.mark.parametrize("ranks,micros,options", STAGES)
def test_stages(ranks, micros, options):
    """All stages have the same bits; with micro-steps, stages 2 and 3 round in each of them."""
    line = ODD + f"-x 3 --clip 0.5 -v 3 -m 2 --gpus {ranks} -d {24 * ranks * micros} {options} -z "
    for stage in range(4):
        train(line + str(stage), "z%d" % stage)
        like = "z2" if micros > 1 and stage >= 2 else "z0"
        same(like, "z%d" % stage, 3)
        for a, b in zip(numbers("z0"), numbers("z%d" % stage)):
            assert a == b or abs(a - b) <= 5e-3 * a  # the norm of a skipped step is None
    for order in ["late", "early", "3", "8"] if FULL or not options else ["5"]:
        train(line + "3", "order", EMU_ORDER=order)
        same("z3", "order", 3)
    assert any(event.get("skipped") for event in log("z0")) == ("-l 100" in options)


@pytest.mark.parametrize("options", [
    "--gpus 3 -d 72 -r block -z 3 --offload weights,moments,master,residuals",
    "--gpus 2 -d 144 --moments bf16 -w none -z 3 --offload weights,residuals",
    "--gpus 3 -d 72 -z 1 --optimizer muon --offload moments,master,residuals",
    "--gpus 2 -d 144 -z 2 --offload moments,master"])
def test_offload(options):
    """Offloading changes no bit."""
    line = ODD + "-x 3 --clip 0.5 -v 3 -m 2 "
    train(line + options.split(" --offload")[0], "device")
    train(line + options, "host", EMU_ORDER="late")
    same("device", "host", 3)


def test_late():
    """Ranks that arrive late at random collectives get the same bits."""
    line = ODD + "-d 72 --gpus 3 -z 1 -x 3 -v 1 -m 4 -s 3 -g 4 --clip 0.5"
    train(line, "undisturbed")
    for seed in "12":
        train(line, "late", EMU_NCCL_SLEEP=seed)
        same("undisturbed", "late", 3)


def test_eval():
    """The score equals that of one rank to the last digit."""
    Path("e.bin").write_bytes(eval_file(questions(7, 50257, 2)))
    line = "-e l1h1c16t16 --eval e.bin --json -b 3 --gpus "
    one = succeeds(line + "1")
    assert all(succeeds(line + n) == one for n in "23")


# Starting.

HYDRA = lambda r, n: {"PMI_SIZE": str(n), "PMI_RANK": str(r), "MPI_LOCALRANKID": str(r),
                      "MPI_LOCALNRANKS": str(n)}
OPEN_MPI = lambda r, n: {"OMPI_COMM_WORLD_SIZE": str(n), "OMPI_COMM_WORLD_RANK": str(r),
                         "OMPI_COMM_WORLD_LOCAL_RANK": str(r),
                         "OMPI_COMM_WORLD_LOCAL_SIZE": str(n), "PMIX_NAMESPACE": "job%d" % PORT}
SRUN = lambda r, n: {"SLURM_STEP_NUM_TASKS": str(n), "SLURM_PROCID": str(r),
                     "SLURM_LOCALID": str(r), "SLURM_NNODES": "1", "SLURM_NTASKS": "7",
                     "SLURM_JOB_ID": str(PORT), "SLURM_STEP_ID": "3"}
# torchrun's own store listens on MASTER_PORT; a surrounding launcher's variables have no effect.
TORCHRUN = lambda r, n: torchrun(r, n, MASTER_ADDR="localhost", MASTER_PORT=str(PORT),
                                 TORCHELASTIC_USE_AGENT_STORE="True", SLURM_STEP_NUM_TASKS="1",
                                 SLURM_PROCID="0", SLURM_LOCALID="0")


def test_launchers():
    """Ranks started by launchers give the same bits as --gpus."""
    line = TINY + "-x 2 --clip 0.5 -z 1 "
    train(line + "--gpus 3", "gpus")
    abroad = lambda r, n: {**OPEN_MPI(r, n), "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                           "MASTER_ADDR": "localhost"}
    for i, variables in enumerate([TORCHRUN, OPEN_MPI, HYDRA, SRUN, abroad]):
        with socket.socket() as store:
            if variables is TORCHRUN:
                store.bind(("localhost", PORT))
                store.listen()
            ranks = start_ranks(line + "--quiet -o by%d" % i, [variables(r, 3) for r in range(3)])
            assert all(o.status == 0 and o.err == "" for o in outcomes(ranks))
        same("gpus", "by%d" % i, 2)


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun")
@pytest.mark.parametrize("ranks", [1, 2])
def test_mpirun(ranks):
    """Under mpirun, which gives ranks a pseudo-terminal, lines are whole and never rewritten."""
    line = ODD + "-d 48 -x 3 -v 1 -m 1 "
    train(line + "--gpus %d" % ranks, "gpus")
    o = run(line + "-o mpi", under="mpirun --oversubscribe --bind-to none -np %d" % ranks,
            env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    assert o.status == 0, o
    assert "\033" not in o.out and "\nstep    2/3  " in o.out and "\nstep    3/3  " in o.out
    same("gpus", "mpi", 3)


def test_two_jobs():
    """Jobs on one machine stay separate, by default and with the same MASTER_PORT."""
    line = TINY + "-x 2 --quiet "
    jobs = [{**OPEN_MPI(r, 2), "PMIX_NAMESPACE": job} for job in "ab" for r in range(2)]
    assert all(o.status == 0 for o in outcomes(start_ranks(line, jobs, [""] * 4, [""] * 4)))
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(PORT)}
    stranger = start(line + "--timeout 10", env=torchrun(1, 2, TORCHELASTIC_RUN_ID="b", **port))
    ranks = [torchrun(r, 2, TORCHELASTIC_RUN_ID="a", **port) for r in range(2)]
    assert all(o.status == 0 for o in outcomes(start_ranks(line, ranks)))
    assert stranger.wait(timeout=LIMIT_S) == 1


@pytest.mark.parametrize("variables,expected", [
    ("WORLD_SIZE=2 MASTER_ADDR=localhost RANK=0 MASTER_PORT=65535 "
     "TORCHELASTIC_USE_AGENT_STORE=True", "MASTER_PORT: invalid port 65536; "),
    ("WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=9", "is 2, but RANK is not set; "),
    ("WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=9 RANK=2", "is too high; expected 0 to 1"),
    ("WORLD_SIZE=2 RANK=0", "MASTER_ADDR is not set and the ranks may be on"),
    ("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
     "MASTER_ADDR is not set and the ranks may be on"),
    ("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 SLURM_NNODES=2", "MASTER_ADDR is not set"),
    ("WORLD_SIZE=two", "WORLD_SIZE: invalid value 'two'; expected an integer between 0 and ")])
def test_variables(variables, expected):
    refused(TINY + "-x 1", expected, env=dict(word.split("=") for word in variables.split()))


def port_of(rank, ranks=2, **more):
    return torchrun(rank, ranks, MASTER_ADDR="localhost", MASTER_PORT=str(PORT), **more)


def test_meeting_refused():
    """Each failure to connect the ranks ends in one line that names it."""
    line = TINY + "-x 1 --quiet --timeout 1"
    with socket.socket() as taken:  # another process has the port
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("localhost", PORT))
        taken.listen()
        refused(line, "rank 0 cannot listen on port %d (MASTER_PORT): Address already in use"
                % PORT, env=port_of(0))

        def answer():
            peer = taken.accept()[0]
            peer.recv(4096)
            peer.sendall(b"x" * 4096)

        threading.Thread(target=answer).start()
        refused(line, "rank 1: the process at localhost, port ", env=port_of(1))
    refused(line, "rank 1: cannot connect to rank 0 at localhost, port %d (MASTER_ADDR, "
            "MASTER_PORT), within 1 s (--timeout): Connection refused" % PORT, env=port_of(1))
    refused(line, "only 1 of 2 ranks connected to port %d within 1 s (--timeout)" % PORT,
            env=port_of(0))
    process = start(TINY + "-x 1", env={**port_of(1), "MASTER_ADDR": "absent.invalid"})
    line = process.stderr.readline()
    assert ": rank 1: waiting for rank 0 at absent.invalid, port %d: " % PORT in line
    process.kill()


@pytest.mark.parametrize("ranks,more,expected", [
    ([(0, 3), (1, 3), (1, 3)], "", "which expects 3 unique ranks"),
    ([(0, 2), (1, 3)], "", "unexpected rank 1 of 3 connected to rank 0, which expects 2"),
    ([(0, 2), (1, 2)], "-j nothing.bin", "rank 1 exited before all ranks were connected")])
def test_ranks_do_not_match(ranks, more, expected):
    processes = start_ranks(TINY + "-x 1 --quiet --timeout 4", [port_of(*rank) for rank in ranks],
                            ["", more, ""])
    all_ended = outcomes(processes)
    assert [o.status for o in all_ended] == [1] * len(ranks) and expected in all_ended[0].err


def connected(message):
    """Connects to rank 0 as soon as it listens, and sends a first message. Returns the socket."""
    while True:
        try:
            peer = socket.create_connection(("localhost", PORT))
            peer.sendall(message)
            return peer
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_stranger():
    """A port scanner that connects first is not mistaken for a rank."""
    zero = start(TINY + "-x 1 --quiet", env=port_of(0))
    with connected(b"x" * 1000):
        one = start(TINY + "-x 1 --quiet", env=port_of(1))
        assert all(o.status == 0 for o in outcomes([zero, one]))


def test_late_for_handshake():
    """Ranks wait for one that starts late or opens its data slowly; one that exits is named."""
    ranks = start_ranks(TINY + "-x 1 --quiet", [port_of(r, 3) for r in (1, 0)])
    time.sleep(4)
    ranks += start_ranks(TINY + "-x 1 --quiet", [port_of(2, 3)])
    assert [o.status for o in outcomes(ranks)] == [0] * 3
    zero = start(TINY + "-x 1 --quiet --timeout 2", env=port_of(0))
    peer, began = connected(struct.pack("<Qii", 0x7472616E6B320000, 1, 2)), time.monotonic()
    assert len(peer.recv(16)) == 16
    while time.monotonic() < began + 7:  # the limit for the first message is 5 s
        assert zero.poll() is None, zero.communicate()
        time.sleep(0.1)
    peer.close()
    ends(zero, "rank 1 exited before all ranks were connected")


@pytest.mark.parametrize("change,expected", [
    ("--seed 7", "rank 1 was given different options than rank 0"),
    ("-l 1e-5", "rank 1 was given different options than rank 0"),
    ("train.bin", "rank 1 reads different data than rank 0"),
    ("val.bin", "rank 1 reads different data than rank 0"),
    ("old card", "rank 1 has a GPU with a different default --dtype than rank 0\n"),
    ("program", "rank 1 runs a different build of the program than rank 0")])
def test_mixed(change, expected, tmp_path):
    """Rank 0 names the first rank whose options, data, card or program differ; no rank trains."""
    line = ODD + "-x 1 -o out "
    if change.endswith(".bin"):
        (tmp_path / "there").mkdir()
        for name in ["train.bin", "val.bin"]:
            data = bytearray(Path(name).read_bytes())
            data[HEADER] ^= name == change
            (tmp_path / "there" / name).write_bytes(data)
        second = start(line, env=port_of(1), under="env -C there")
    elif change == "program":
        Path("program").write_bytes(Path(program.path).read_bytes() + b"x")
        os.chmod("program", 0o755)
        second = start(["./program", *line.split()], env=port_of(1))
    else:
        old = change == "old card"
        second = start(line + change * (not old), env=port_of(1, **{"EMU_CC": "75"} if old else {}))
    zero, one = outcomes([start(line, env=port_of(0)), second])
    assert zero.status == one.status == 1 and expected in zero.err, (zero, one)
    assert zero.err.count("\n") == 1
    assert "step    1/1" not in zero.out


def test_least_memory():
    """Ranks whose GPUs have different memory all plan for the smallest, also with -b auto."""
    line = "-i train.bin -e l1h1c16t16 -d 512 -x 1 "
    for small in range(2):
        env = [port_of(r, EMU_GPU_MEM="1g" if r == small else "2g") for r in range(2)]
        zero, one = outcomes(start_ranks(line + "-o out%d" % small, env))
        assert zero.status == one.status == 0, (zero, one)
        steps = [re.search(r"step .*tokens = .* x .*?;", out).group() for out in (
            zero.out, succeeds(line + "--gpus 2", env={"EMU_GPU_MEM": "1g"}),
            succeeds(line + "--gpus 2", env={"EMU_GPU_MEM": "2g"}))]
        assert steps[0] == steps[1] != steps[2]


def test_one_gpu():
    """srun's local ID selects the GPU, not the order of the ranks on the machine."""
    env = [{**SRUN(r, 2), "SLURM_LOCALID": "0"} for r in range(2)]
    zero = outcomes(start_ranks(TINY + "-x 1 --timeout 4", env))[0]
    assert "ranks 0 and 1 would share GPU " in zero.err
    assert "srun: --gpu-bind=none" in zero.err


@pytest.mark.parametrize("arguments,env,expected", [
    ("--gpus 3 -d 100", {}, "is not a multiple of B x T x ranks = 2 x 12 x 3"),
    ("--gpus 2 -z 4", {}, "--zero (-z): invalid value '4'"),
    ("--gpus 2 -z 3 --eval nothing", {}, "--eval does not support --zero (-z) 3"),
    ("--gpus 2 --check", {}, "--gpus 2: --check and --generate support only one GPU"),
    ("--timeout 9", {}, "--timeout requires multiple ranks"),
    ("--gpus 2 --offload gradients", {}, "gradients is not supported on 2 GPUs"),
    ("--gpus 2 --offload weights", {}, "--offload weights on 2 GPUs requires --zero (-z) 3"),
    ("--gpus 2 -z 2 --offload weights", {}, "--offload weights on 2 GPUs requires --zero (-z) 3"),
    ("--gpus 3", {"EMU_GPUS": "2"}, "ranks 0 and 2 would share GPU 00000000"),
    ("--gpus 2", {**HYDRA(0, 2)}, "a launcher has already started ranks")])
def test_refused(arguments, env, expected):
    refused(ODD + arguments, expected, env=env)


# Choices and memory.

def test_matmul_sms():
    """Matmuls that run beside NCCL over PCIe, backward or Muon's, leave two SMs to it."""
    line = ODD + "-d 48 -x 1 --optimizer muon --quiet -o "
    for ranks, stage, sms in (1, 0, {""}), (2, 0, {"", ":130"}), (2, 2, {":130"}):
        out = "out%d%d" % (ranks, stage)
        succeeds(line + "%s --gpus %d -z %d" % (out, ranks, stage), env={"EMU_SMS": "132"})
        state = step(1, out) / ("state-0-of-%d.safetensors" % ranks)
        matmuls = tensors(state.read_bytes())[0]["matmul"]
        backward = r":0[01]0[01]0:\d+>\d+(:\d+|)="
        assert set(re.findall(backward, matmuls)) == sms, matmuls
        assert set(re.findall(r"(:\d+|)\*\d+=", matmuls)) == {max(sms)}, matmuls  # Muon
        assert set(re.findall(r":10\d{3}:\d+>\d+(:\d+|)=", matmuls)) == {""}, matmuls  # forward


def test_choices():
    """All ranks compute with rank 0's choice, here the third; unlike GPUs use the defaults."""
    line = ODD + "-d 48 -x 2 --quiet -o "
    cases = {"all": {}, "one": {"EMU_LT_WRONG": "3"}, "unlike": {"EMU_UNLIKE": "1"}}
    for name, env in cases.items():
        # Rank 1 has its own cache and would choose the first. A wrong third one shows if it runs.
        second = {**port_of(1), "XDG_CACHE_HOME": os.getcwd() + "/" + name, "EMU_LT_TIMES": "159"}
        first = {**port_of(0), "EMU_LT_TIMES": "951"}
        both = start_ranks(line + name, [{**first, "EMU_UNLIKE": env.get("EMU_UNLIKE", "0")},
                                         {**second, **env}])
        assert all(o.status == 0 and o.err == "" for o in outcomes(both))
    assert numbers("all") == numbers("unlike")
    assert numbers("all") != numbers("one")
    choices = [tensors((step(2, name) / "state-0-of-2.safetensors").read_bytes())[0]
               ["matmul"] for name in ("all", "unlike")]
    assert choices[0] != choices[1]


MEMORY = [(2, "-z 0", 2, {}), (3, "-z 0", 16, {"EMU_NVLINK": "1"}),
          (2, "-z 1", 5, {"EMU_NVLINK": "1", "NCCL_MAX_CTAS": "5"}), (3, "-z 2", 2, {}),
          (3, "-z 3", 1, {"NCCL_MAX_CTAS": "1"}), (3, "-z 3 --offload weights,moments", 2, {})]


@pytest.mark.parametrize("ranks,options,ctas,env", MEMORY)
def test_memory(ranks, options, ctas, env):
    """The plan and NCCL's reserve (12 MiB for each of a CTA's two neighbors, and 64 MiB) fit to the
    byte. With one byte less, the message names what is missing."""
    more = "" if "--offload" in options else " --offload none"
    line = ODD + "-x 1 -r none -d %d --gpus %d %s" % (24 * ranks, ranks, options + more)
    plan = json.loads(succeeds(line + " --plan --json"))
    reserve = (2 * ctas * 12 + 64) << 20
    env = {**env, "EMU_CONTEXT": "300M", "EMU_LIBRARY": "200M", "EMU_NCCL": "12M",
           "EMU_GPU_MEM": str(plan["total_bytes"] + reserve + (500 << 20))}
    succeeds(line, env=env)
    refused(line, "1 B", status=3, env={**env, "EMU_GPU_MEM": str(int(env["EMU_GPU_MEM"]) - 1)})


@pytest.mark.parametrize("card,mib", [("h100", 448), ("", 112)])
def test_one_visible_gpu(card, mib):
    """A rank that sees only one GPU reserves memory for NCCL according to its card's links. Their
    % of peak is that of all cards."""
    env = [port_of(r, EMU_GPUS="1", EMU_NAME=card, EMU_SMS="132", EMU_GPU_MEM="80g",
                   EMU_NCCL="12m", EMU_MACHINE=str(r)) for r in range(2)]
    small = [{**e, "EMU_CONTEXT": str((80 << 30) - (mib - 1 << 20))} for e in env]
    zero = outcomes(start_ranks(TINY + "-x 1", small))[0]
    assert zero.status == 3 and "file buffers use all %d.0 MiB" % (mib - 1) in zero.err, zero
    zero, one = outcomes(start_ranks(TINY + "-x 1 -o two", env))
    assert zero.status == one.status == 0, (zero, one)
    succeeds(TINY + "-x 1 -o one", env={k: v for k, v in env[0].items() if k.startswith("EMU")})
    two, one = (e["tokens_per_s"] / (e["peak_pct"] or float("nan"))
                for name in ("two", "one") for e in log(name) if "loss" in e)
    assert two == pytest.approx(2 * one if card else float("nan"), nan_ok=True)


# Checkpoints.

@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume(optimizer):
    """Any number of ranks resumes a checkpoint of three; three continue with the same bits."""
    line = ODD + "--dtype fp32 -d 144 -k constant -n 2 -v 0 --optimizer %s " % optimizer
    whole = "--gpus 3 -z 3 "
    train(line + whole + "-x 4", "whole")
    train(line + whole + "-x 2", "begun")
    for more in ["--gpus 3 -z 3", "--gpus 3 -z 1", "--gpus 2 -z 2", "--gpus 1", "--gpus 6 -z 0"]:
        shutil.rmtree("out", ignore_errors=True)
        shutil.copytree("begun", "out")
        succeeds("--quiet -o out -y 1 -x 4 " + line + more)
        if more == "--gpus 3 -z 3":
            same("whole", "out", 4)
        for a, b in zip(numbers("whole"), numbers("out")):
            assert abs(a - b) <= 2e-6 * a, more
    assert training_state(2, "begun") == training_state(2, "whole")


def test_resume_alone():
    """`-o FOLDER -y` keeps the tokens per step, and so the loss, on another number of ranks."""
    succeeds(TINY + "-j val.bin -v 1 -m 0 -l 0 --dtype fp32 -x 1 --gpus 2 -z 1 -o out")
    for gpus in 1, 2:
        out = succeeds("-o out -y --gpus %d -x %d" % (gpus, gpus + 1))
        assert re.search(r"\nstep     64 tokens = .* x %d GPUs?; " % gpus, out)
    losses = series("val_loss")
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("name,rank", [
    ("state-0-of-3.safetensors", ""), ("state-2-of-3.safetensors", "rank 2: "),
    ("model.safetensors", ""), ("manifest.json", "")])
def test_full(name, rank):
    """If one rank cannot write, rank 0 removes what all have written; the last checkpoint stays."""
    line, part = TINY + "--gpus 3 -z 1 --quiet -o out ", "out/step-00000004.tmp/"
    succeeds(line + "-x 2")
    good = checkpoint(2)
    os.makedirs(part + name)
    refused(line + "-x 4 -y 1", rank + "cannot write " + part + name + ": Is a directory")
    assert names(part) == [name] and checkpoint(2) == good
    shutil.rmtree(part)
    succeeds(line + "-x 4 -y 1")


def two_machines(line):
    """Starts two ranks with folders of their own, A and B."""
    return [start(line, before=lambda r=r: os.chdir("AB"[r]), env=torchrun(
        r, 2, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", EMU_MACHINE=str(r + 1), MASTER_ADDR="localhost",
        MASTER_PORT=str(PORT + 7))) for r in range(2)]


def test_unshared_output():
    """Machines that do not share -o find out before the first step."""
    for folder in "A", "B":
        os.makedirs(folder + "/out/step-00000002.tmp")
    line = "-i ../train.bin -e l2h2c16t16 -b 2 --tune 0 --timeout 1 -x 4 -o out "
    zero, one = outcomes(two_machines(line))
    assert zero.status == one.status == 1 and "\nstep    1/" not in zero.out
    assert re.fullmatch(
        r"train_gpt2cu_cpu: rank 1: --output \(-o\): cannot create out/step-\d+.tmp/"
        r"state-1-of-2.safetensors: No such file or directory; all machines must share the folder "
        r"out, to which rank 0 writes\n", one.err), one
    assert names("A/out") == ["lock"]


def test_lost_output():
    """If a rank's file is not in the folder of rank 0, the checkpoint is not called saved."""
    os.makedirs("A/out")
    os.makedirs("B/lost/step-00000300.tmp")
    os.symlink("../A/out", "B/out")
    processes = two_machines("-i ../train.bin -e l1h1c16t16 -b 1 --tune 0 -x 300 -n 300 -o out")
    wait_until(lambda: Path("A/out/log.jsonl").exists() and log_steps("A/out"))
    os.rename("B/out", "B/was")
    os.rename("B/lost", "B/out")
    zero, one = outcomes(processes)
    assert zero.status == one.status == 1 and "saved" not in zero.out
    assert zero.err == ("train_gpt2cu_cpu: cannot save out/step-00000300.tmp: "
                        "state-1-of-2.safetensors cannot be read\n")
    assert names("A/out") == ["lock", "log.jsonl"]


@pytest.mark.parametrize("steps, call", [
    (2, "-e trace=rename -e inject=rename:delay_enter=3000000:when=1"),
    (3, "-P out/step-00000002/state-1-of-3.safetensors -e trace=openat "
        "-e inject=openat:delay_enter=3000000:when=2")], ids=["save", "load"])
def test_slow_files(steps, call):
    """Saving or loading may take ten times --timeout. A resume opens a file twice: it verifies."""
    if not shutil.which("strace"):
        pytest.skip("no strace")
    line = TINY + "--quiet -o out -y 1 "
    if steps > 2:
        succeeds(line + "-x 2 --gpus 3")
    ranks = start_ranks(line + "--timeout 2 -x %d" % steps, [
        port_of(r, 3, EMU_NCCL_HANG="1") for r in range(3)],
        under=["strace -f -qqq -o /dev/null " + call, "", ""])
    all_ended = outcomes(ranks)
    assert [o.status for o in all_ended] == [0] * 3, all_ended
    assert names("out", "step")[-1] == "step-%08d" % steps


# Ends.

@pytest.mark.parametrize("victim", [2, 0])
def test_killed(victim):
    """If a rank is killed, one line names it, although on GPUs the others would wait forever."""
    process, ranks = start_long()
    os.kill(ranks[victim], signal.SIGKILL)
    err = ends(process, "rank %d was killed by signal 9 (Killed); stopping the run" % victim)
    assert err.count("\n") == 1
    none_left(ranks)


def test_killed_parent():
    process, ranks = start_long()
    process.kill()
    none_left(ranks)


@pytest.mark.parametrize("fault", [
    None, {"EMU_FAULT_RANK": "2", "EMU_FAULT_LAUNCH": "500"},
    {"EMU_FAULT_RANK": "1", "EMU_FAULT_SKIP": "200"}])
def test_hangs(fault):
    """A rank that is stopped, hangs or skips a collective ends the run within the timeout."""
    if fault:
        process = start(ODD + "-d 72 --gpus 3 -z 1 -x 10000 --quiet --timeout 3",
                        env={"EMU_NCCL_HANG": "1", **fault})
        ranks = []
    else:
        process, ranks = start_long("--timeout 3")
        os.kill(ranks[1], signal.SIGSTOP)
    ends(process, "no progress for 3 s (--timeout) after step ",
         ", while training; this rank or one it is waiting for is hung")
    none_left(ranks)


def test_stopped_as_a_whole():
    """A run that was stopped as a whole, as by Ctrl-Z, continues, however long the pause was."""
    process, ranks = start_long("--timeout 2")
    for pid in [*ranks, process.pid]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # twice the timeout
    for pid in [*ranks, process.pid]:
        os.kill(pid, signal.SIGCONT)
    steps = len(log_steps())
    wait_until(lambda: len(log_steps()) > steps + 5)
    assert stopped(process, signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("rank,number", [(-1, signal.SIGTERM), (2, signal.SIGUSR1),
                                         (1, signal.SIGINT), (0, signal.SIGINT)])
def test_signals(rank, number):
    """A signal to any process makes all save the same step; a resumed one has the same bytes."""
    line = TINY + "-j val.bin --gpus 3 -z 1 -k constant -v 2 -m 3 -s 2 -g 5 --quiet "
    process = start(line + "-x 1000 -o out")
    wait_until(lambda: Path("out/log.jsonl").exists() and len(log_steps()) >= 1)
    os.kill(process.pid if rank < 0 else children(process)[rank], number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and err == "", err
    last = log_steps()[-1]
    assert last < 1000 and names("out", "step") == ["step-%08d" % last]
    succeeds(line + "-x %d -y 1 -o out" % (last + 2))
    succeeds(line + "-x %d -o plain" % (last + 2))
    assert training_state(last + 2) == training_state(last + 2, "plain")


def test_fault():
    """A token outside the vocabulary, which one rank reads, stops all ranks at the same step."""
    line = "-i wrong.bin -e l2h2c16t16 -b 2 --gpus 3 -z 1 --shuffle 0 -x 30 --quiet -o out"
    data = bytearray(Path("train.bin").read_bytes())
    at = HEADER + 2 * (14 * 16 + 8)  # step 3 starts at sequence 12; rank 1 reads 14 and 15
    data[at:at + 2] = b"\xff\xff"
    Path("wrong.bin").write_bytes(data)
    err = refused(line, "rank 1: wrong.bin: token ")
    assert "out of range for a vocab" in err and "stopped after step 2, which was saved" in err
    assert names("out", "step") == ["step-00000002"]


def test_nccl_fails():
    env = {"EMU_FAULT_RANK": "1", "EMU_FAULT_INIT": "1", "EMU_NCCL_HANG": "1"}
    assert "rank 1: " in refused(TINY + "-x 1 --gpus 2", "unhandled system error", env=env)


# What the emulated device logs.

def logged(arguments):
    """The log lines of one rank."""
    lines = run(arguments, env={"EMU_LOG": "1"}).err.split("\n")
    own = next(line for line in lines if "] AllGather" in line).split("]")[0] + "] "
    return [line[len(own):].lstrip("(") for line in lines if line.startswith(own)]


def stream(line, before=" on stream "):
    found = re.search(before + r"(\d+)", line)
    return int(found.group(1)) if found else -1


def test_overlap():
    """Gradients are reduced once a block's backward pass is queued; compute waits at the end."""
    lines = logged(ODD + "-d 72 --gpus 3 -x 1 -v 0 -z 1")
    last = max(i for i, line in enumerate(lines) if line.startswith("adamw_kernel"))
    step = lines[:last]
    reduces = [i for i, line in enumerate(step) if line.startswith("ReduceScatter")]
    reduces = reduces[-6:]  # blocks 2, 1, 0; wte, wpe, vectors
    compute = stream(next(line for line in reversed(step) if line.startswith("matmul")))
    exchange = stream(step[reduces[0]])
    waits = [i for i, line in enumerate(step) if i > reduces[0] and line.startswith(
        "stream %d waits for stream %d," % (compute, exchange))]
    assert waits and waits[0] > reduces[-1]
    for a, b in zip(reduces[:2], reduces[1:3]):
        assert sum(stream(line) == compute for line in step[a:b]) > 5
        assert any(line.startswith("stream %d waits for stream %d," % (exchange, compute))
                   for line in step[a:b])


@pytest.mark.parametrize("options", ["-z 1 -d 72", "-z 2 -d 144"])
def test_gathers(options):
    """Weights are gathered right after their bucket's AdamW, and awaited just before their use."""
    lines = logged(ODD + "--gpus 3 -x 3 -v 0 " + options)
    updates = [i for i, line in enumerate(lines) if line.startswith("adamw_kernel")]
    assert len(updates) >= 4 * 6  # in the warm-up, too; vectors first, then five buckets
    begin, end = updates[-12], updates[-6]
    compute, step, gathers, matmuls, awaited = stream(lines[begin]), lines[begin:end], [], 0, []
    calls = sum(line.startswith(("AllGather", "ReduceScatter", "Broadcast"))
                for line in lines[:begin])
    updated = 0
    for line in step:
        updated += line.startswith("adamw_kernel")
        calls += line.startswith(("AllGather", "ReduceScatter", "Broadcast"))
        if line.startswith("AllGather") and len(gathers) < 5:
            assert updated == 2 + len(gathers)
            gathers.append(calls)
            exchange = stream(line)
        matmuls += line.startswith("matmul")
        if len(gathers) == 5 and line.startswith("stream %d waits for stream %d," % (
                compute, exchange)) and stream(line, ", after ") in gathers:
            awaited.append((gathers.index(stream(line, ", after ")), matmuls))
    assert awaited[:5] == [(0, 0), (1, 0), (2, 0), (3, 4), (4, 8)]  # then by later micro-steps


@pytest.mark.parametrize("ranks,stage,optimizer", [
    *((n, z, "adamw") for n in (2, 3) for z in range(4)), (3, 0, "muon"), (3, 1, "muon")])
def test_traffic(ranks, stage, optimizer):
    """A step sends exactly the shards of every bucket, once in the reduce-scatter and once in the
    all-gather; with k micro-steps, blocks' gradients are reduced in each from stage 2 on. Muon
    gathers blocks if they are sharded. Of each block's two large and four square matrices, the
    busiest of three ranks has one of each, the size of every share. The plan prints the number."""
    C, L, k = 80, 3, 3 if ranks == 2 and stage > 0 else 1
    padded = lambda count, to: -(-count // to) * to
    to = 64 * ranks
    stay = padded(384 * C, to) + padded(16 * C, to)
    blocks = L * padded(12 * C * C, to)
    vector = padded(C, 64)
    vectors = padded(L * (6 * vector + padded(3 * C, 64) + padded(4 * C, 64)) + 2 * vector, to)
    reduced = 2 * (stay + (k if stage >= 2 else 1) * blocks) + 4 * vectors
    # Stage 3 gathers in every micro-step's forward and backward pass, except the last two blocks,
    # which forward keeps for backward, and the first two, which backward keeps for the next one.
    transfers = 2 * k * L - 4 * k + 2 if stage == 3 else L
    gathered = 2 * (stay + blocks // L * transfers) + 4 * vectors
    gathered += 2 * (L * 3 * (4 + 1) * C * C + blocks * (stage > 0)) * (optimizer == "muon")
    want = (reduced + gathered) // ranks * (ranks - 1) + 64 * (ranks - 1)  # and the status
    line = ODD + "-d %d --gpus %d -z %d -k constant --quiet --optimizer %s " % (
        24 * ranks * k, ranks, stage, optimizer)

    def sent(arguments):
        found = [re.search(r", (\d+) bytes sent$", text) for text in logged(arguments)]
        return sum(int(f.group(1)) for f in found if f)

    assert sent(line + "-x 2") - sent(line + "-x 1") == want
    shown = "%.1f %s" % (want / 2**20, "MiB") if want >= 2**20 else "%.1f KiB" % (want / 2**10)
    assert "sends %s per GPU" % shown in " ".join(succeeds(line + "--plan").split())


def test_skip():
    """If one rank sends a NaN, all ranks skip the step, and in fp16 halve their loss scales."""
    for dtype, stages in ("bf16", (0, 1, 3)), ("fp16", (0, 3)):
        line = ODD + "-d 72 --gpus 3 -k constant --dtype %s -z " % dtype
        for stage in stages:
            calls = [text for text in logged(line + "%d -x 2 -o %s%d" % (stage, dtype, stage))
                     if text.startswith(("AllGather", "ReduceScatter", "Broadcast"))]
            step_2 = max(i for i, text in enumerate(calls) if text.startswith("ReduceScatter")) + 1
            train(line + "%d -x 4" % stage, "nan%d" % stage, EMU_FAULT_RANK="2",
                  EMU_FAULT_NAN=str(step_2))
            events = [event for event in log("nan%d" % stage) if "loss" in event]
            assert [event.get("skipped", 0) for event in events] == [0, 1, 0, 0]
            if dtype == "fp16":
                assert [event["loss_scale_log2"] for event in events] == [16, 15, 15, 15]
            same("nan0", "nan%d" % stage, 4)


@pytest.mark.parametrize("options", [
    ODD + "-d 48 -z 0", ODD + "-d 144 -z 3 --optimizer muon",
    "-i train.bin -j val.bin -e l3h1c64t16 -b 2 -d 128 -z 3"])    # with Hopper's attention kernels
def test_first(options):
    """No kernel or matmul is called for the first time while a collective may be waiting for
    another rank: with algorithms that were timed, were read from the file, or were read from a
    checkpoint. The emulated device ends a program that violates this."""
    line = options + " --gpus 2 -v 1 -m 3 -s 1 -g 2 --logit-rows 9 --quiet -o out -x "
    succeeds(line + "1", env={"EMU_LT_TIMES": "951"})
    succeeds(line + "2 -y 1", env={"EMU_LT_TIMES": "951"})
    succeeds(line + "3 -y 1", env={"EMU_LT_TIMES": "159", "XDG_CACHE_HOME": os.getcwd() + "/other"})


def test_gradients():
    """The gradient (--beta1 0: the first moment) is one rank's in every bucket, even if padded."""
    line = ODD + "-d 144 -x 1 --beta1 0 --clip 0 --dtype fp32 "
    train(line, "one")
    want = training_state(1, "one")[1]
    for ranks, stage in [(2, 0), (3, 1), (3, 2), (6, 3)]:
        train(line + "--gpus %d -z %d" % (ranks, stage), "some")
        got = training_state(1, "some")[1]
        moments = [key for key in want if key[0].endswith("m")]
        assert moments and want.keys() == got.keys()
        for key in moments:
            a, b = (array.array("f", state[key]) for state in (want, got))
            assert len(a) == len(b) and any(a)
            assert sum((x - y) ** 2 for x, y in zip(a, b)) <= 1e-12 * sum(x * x for x in a), key
