//! The program `fireclay`: see [`cli`].

mod cli;

use std::process::ExitCode;

/// Reuses memory freed by a step: the system's allocator would return it to the system, which
/// clears each page again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
