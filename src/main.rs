//! The program `fireclay`: see [`cli`].

mod cli;

use std::process::ExitCode;

/// Keeps freed memory for the next step; the system's allocator gives large blocks back, and each of their pages faults
/// again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
