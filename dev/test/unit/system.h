// system.h -- tests of chapter The system: limits of memory and cores, with a fake /proc and /sys.

// Writes a file of a fake /proc and /sys and creates missing folders.
static void put(const Text &path, const Text &bytes) {
    for (size_t at = 0; (at = path.find('/', at + 1)) != Text::npos;) {
        mkdir(path.substr(0, at).c_str(), 0755);
    }
    write_file(path, bytes);
}

// Memory limits of cgroups v1 and v2, at any depth.
TEST(host_memory, HOST) {
    auto found = [](const char *root, int64_t mib, const char *limit) {
        const HostMemory h = host_memory(root);
        expect(h.bytes >> 20 == mib && Text(h.limit).find(limit) == 0, "%s: %" PRId64 " MiB, %s",
               root, h.bytes >> 20, h.limit);
    };
    for (const char *root : {"v1", "v2", "none", "container"}) {
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
    found("v2", 1024 - 300, "memory.max of cgroup /slurm/job_7");
    put(job + "step_0/memory.high", "734003200\n");
    found("v2", 600, "memory.high of cgroup /slurm/job_7/step_0");
    put("v2/sys/fs/cgroup/memory.max", "104857600\n");
    found("v2", 600, "memory.high of cgroup");  // usage cannot be read: the limit is ignored
    put("v2/sys/fs/cgroup/memory.current", "0\n");
    found("v2", 600, "memory.high of cgroup");  // nor can the size of cached files
    put("v2/sys/fs/cgroup/memory.stat", "inactive_file 0\n");
    found("v2", 100, "memory.max of cgroup /");
    put("v1/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/slurm/job_7\n0::/x\n");
    const Text v1 = "v1/sys/fs/cgroup/memory/slurm/";
    put(v1 + "job_7/memory.limit_in_bytes", "9223372036854771712\n");
    put(v1 + "job_7/memory.usage_in_bytes", "104857600\n");
    found("v1", 8192, "free memory of this machine");
    put(v1 + "memory.limit_in_bytes", "1073741824\n");
    put(v1 + "memory.usage_in_bytes", "524288000\n");
    put(v1 + "memory.stat", "inactive_file 1\ntotal_inactive_file 209715200\n");
    found("v1", 1024 - 300, "memory.limit_in_bytes of cgroup /slurm");
    put(v1 + "memory.usage_in_bytes", "9073741824\n");
    found("v1", 0, "memory.limit_in_bytes of cgroup /slurm");
    put("container/proc/self/cgroup", "4:memory:/docker/0123\n");
    put("container/sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
    put("container/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n");
    put("container/sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n");
    found("container", 1024, "memory.limit_in_bytes of cgroup /");
    found("none", 8192, "free memory of this machine");
    const HostMemory unknown = host_memory("absent");  // no information: no limit
    expect(unknown.bytes == INT64_MAX && !unknown.limit[0], "%" PRId64 " bytes, %s", unknown.bytes,
           unknown.limit);
}

// CPU quotas of cgroups v1 and v2, at any depth.
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
    put("q1/proc/self/cgroup", "7:cpuset:/x\n5:cpu,cpuacct:/a\n4:memory:/b\n0::/\n");
    put("q1/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "100000\n");  // another controller's group
    put("q1/sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000\n");
    put("q1/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
    put("q1/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
    found("q1", 16);
    put("q1/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n");
    put("q1/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    found("q1", 4);
}
