// system.h -- tests of train_gpt2.c's memory and core limits, with a fake /proc and /sys.

// Writes a file of a fake /proc or /sys, creating missing directories.
static void put(const Text &path, const Text &bytes) {
    for (size_t at = 0; (at = path.find('/', at + 1)) != Text::npos;) {
        mkdir(path.substr(0, at).c_str(), 0755);
    }
    write_file(path, bytes);
}

TEST(host_memory, HOST) {
    auto found = [](const char *root, int64_t mib, const char *limit) {
        const HostMemory h = host_memory(root);
        expect(h.bytes >> 20 == mib && Text(h.limit).find(limit) == 0, "%s: %" PRId64 " MiB, %s",
               root, h.bytes >> 20, h.limit);
    };
    for (const char *root : {"v2", "none"}) {
        put(Text(root) + "/proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n");
    }
    put("v2/proc/self/cgroup", "0::/slurm/job_7/step_0\n");
    const Text job = "v2/sys/fs/cgroup/slurm/job_7/";
    put(job + "memory.max", "1073741824\n");
    put(job + "memory.current", "524288000\n");
    put(job + "memory.stat", "anon 5\ninactive_file 209715200\nfile 7\n");
    put(job + "step_0/memory.max", "max\n");
    put(job + "step_0/memory.current", "104857600\n");
    put(job + "step_0/memory.stat", "inactive_file 0\n");
    found("v2", 1024 - 300, "memory.max");
    put(job + "step_0/memory.high", "734003200\n");
    found("v2", 600, "memory.high");
    put("v2/sys/fs/cgroup/memory.max", "104857600\n");
    found("v2", 600, "memory.high");  // the limit is ignored if usage cannot be read
    put("v2/sys/fs/cgroup/memory.current", "0\n");
    found("v2", 600, "memory.high");  // or if the size of cached files cannot
    put("v2/sys/fs/cgroup/memory.stat", "inactive_file 0\n");
    found("v2", 100, "memory.max");
    found("none", 8192, "free memory of this machine");
    // Version 1: limits of the group and of its parents; the largest number means none.
    const Text memory = "v1/sys/fs/cgroup/memory/";
    put("v1/proc/meminfo", "MemAvailable: 8388608 kB\n");
    put("v1/proc/self/cgroup", "12:cpuset:/\n11:memory:/docker/abc\n1:name=systemd:/\n0::/x\n");
    put(memory + "memory.limit_in_bytes", "9223372036854771712\n");
    put(memory + "memory.usage_in_bytes", "0\n");
    put(memory + "memory.stat", "total_inactive_file 0\n");
    found("v1", 8192, "free memory of this machine");
    put(memory + "docker/memory.limit_in_bytes", "1073741824\n");
    put(memory + "docker/memory.usage_in_bytes", "524288000\n");
    put(memory + "docker/memory.stat", "inactive_file 5\ntotal_inactive_file 209715200\n");
    found("v1", 1024 - 300, "memory.limit_in_bytes");
    put(memory + "docker/abc/memory.limit_in_bytes", "104857600\n");
    put(memory + "docker/abc/memory.usage_in_bytes", "0\n");
    put(memory + "docker/abc/memory.stat", "total_inactive_file 0\n");
    found("v1", 100, "memory.limit_in_bytes");
    put("v1/sys/fs/cgroup/unified/x/memory.max", "52428800\n");  // systemd's hybrid layout
    put("v1/sys/fs/cgroup/unified/x/memory.current", "0\n");
    put("v1/sys/fs/cgroup/unified/x/memory.stat", "inactive_file 0\n");
    found("v1", 50, "memory.max");
    const HostMemory unknown = host_memory("absent");  // no limit if nothing is known
    expect(unknown.bytes == INT64_MAX && !unknown.limit[0], "%" PRId64 " bytes, %s", unknown.bytes,
           unknown.limit);
}

TEST(host_cores, HOST) {
    auto found = [](const char *root, int cores) {
        expect(host_cores(root, 16) == cores, "%s: %d cores, not %d", root, host_cores(root, 16),
               cores);
    };
    found("nothing", 16);
    put("q2/proc/self/cgroup", "0::/slurm/job_7\n");
    put("q2/sys/fs/cgroup/slurm/job_7/cpu.max", "max 100000\n");
    found("q2", 16);
    put("q2/sys/fs/cgroup/slurm/cpu.max", "250000 100000\n");
    found("q2", 3);
    put("q2/sys/fs/cgroup/slurm/job_7/cpu.max", "50000 100000\n");
    found("q2", 1);
    put("q1/proc/self/cgroup", "3:cpuset:/a\n2:cpuacct,cpu:/a/b\n0::/\n");  // version 1
    put("q1/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
    found("q1", 16);
    put("q1/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
    found("q1", 3);
    put("q1/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "10000\n");
    put("q1/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "5000\n");
    found("q1", 2);
}
