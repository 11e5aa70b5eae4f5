"""dev/slurm/train.sh under a real Slurm of two nodes on this machine, with the emulated program.
Needs root and Debian's slurm-wlm and munge. The daemons use files and ports of their own; while the
test runs, /etc/hosts names the nodes."""

import socket, stat

import program
from files import *

CONF = """ClusterName=test
SlurmctldHost=%(host)s
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket=%(folder)s/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=%(folder)s/state
SlurmdSpoolDir=%(folder)s/spool-%%n
SlurmctldPidFile=%(folder)s/ctld.pid
SlurmdPidFile=%(folder)s/slurmd-%%n.pid
SlurmctldPort=%(port)s
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
NodeName=n[1-2] NodeHostname=%(host)s NodeAddr=127.0.0.1 Port=[%(ports)s] CPUs=64 \
RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Starts Slurm. The two nodes are one machine: the emulator is told which of them it is on."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        pytest.skip("needs root, slurm-wlm and munge")
    if subprocess.run(["pgrep", "-x", "munged"], stdout=subprocess.DEVNULL).returncode == 0:
        pytest.skip("munged runs already")
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in one, two, three:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, two, three)]
    host = socket.gethostname()
    Path("state").mkdir()
    for name in "gpu0", "gpu1":
        os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(1, 3))    # as /dev/null
    Path("gres.conf").write_text("Name=gpu File=%s/gpu[0-1]\n" % tmp_path)
    Path("slurm.conf").write_text(CONF % {"folder": tmp_path, "host": host, "port": ports[0],
                                          "ports": "%d,%d" % tuple(ports[1:])})
    Path("key").write_bytes(os.urandom(128))
    os.chmod("key", 0o400)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("EMU_GPUS", "2")
    files = ("socket=%s/munge", "key-file=%s/key", "pid-file=%s/pid", "log-file=%s/munge.log",
             "seed-file=%s/seed")
    for command in (["munged", "-F", "-f", *("--" + name % tmp_path for name in files)],
                    ["slurmctld", "-c", "-D"], ["slurmd", "-D", "-N", "n1"],
                    ["slurmd", "-D", "-N", "n2"]):
        with open("daemons.log", "a") as log:
            start(command, stdout=log, stderr=log)
        time.sleep(1)
    hosts = Path("/etc/hosts").read_text()
    Path("/etc/hosts").write_text(hosts + "\n127.0.0.1 n1 n2\n")
    shutil.copytree(TOP / "dev/recipes", "dev/recipes")
    shutil.copytree(TOP / "dev/slurm", "dev/slurm")
    shutil.copy(program.path, "emulated")
    script(Path("train_gpt2cu"),
           '#!/bin/sh\nEMU_MACHINE=$SLURM_NODEID exec ./emulated "$@"\n')
    yield
    Path("/etc/hosts").write_text(hosts)


def submit(arguments):
    said = subprocess.run(["sbatch", "--parsable", "--cpus-per-task=1", "--ntasks-per-node=2",
                           "--gpus-per-node=2", "dev/slurm/train.sh", *arguments.split()],
                          capture_output=True, text=True)
    assert said.returncode == 0, said
    return said.stdout.strip(), Path("train_gpt2-%s.log" % said.stdout.strip())


def ended(job):
    return not subprocess.check_output(["squeue", "-h", "-j", job])


@pytest.mark.all
@pytest.mark.gpu
@pytest.mark.emulated
def test_slurm(slurm):
    """Options replace the script's; SIGUSR1 saves; a second job resumes; a killed task ends it."""
    options = "-i train.bin --model l2h2c64t64 -b 4 -v 0 --steps="
    job, log = submit(options + "4 -n 2")
    wait_until(lambda: ended(job))
    assert "finished after step 4" in log.read_text() and names("runs/slurm")[-1] == step(4).name
    job, log = submit(options + "400 --log-every 1")
    wait_until(lambda: log.exists() and "\nstep   10/" in log.read_text())
    subprocess.run(["scancel", "--signal=USR1", job + ".0"])
    wait_until(lambda: ended(job))
    assert "resumed from runs/slurm/" in log.read_text() and "\ninterrupted" in log.read_text()
    job, log = submit(options + "4000 --log-every 1")
    wait_until(lambda: log.exists() and "\nstep " in log.read_text())
    pid = subprocess.check_output(["pgrep", "-n", "-f", "^./emulated -"], text=True)
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: ended(job))
    assert "finished" not in log.read_text()
