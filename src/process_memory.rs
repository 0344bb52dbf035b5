//! Memory of this process.

use fireclay_kernels::recorder::Memory;

/// Current and peak use, where the system reports it.
pub(crate) fn process_memory() -> Option<Memory> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    Some(Memory { in_use: field("VmRSS:")?, reserved: field("VmHWM:")? })
}
