//! The program `fireclay`: see [`cli`].

mod cli;

use std::process::ExitCode;

/// Keeps what a step gave back for the next one: the system's allocator would give it to the system, which clears each
/// page again.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
