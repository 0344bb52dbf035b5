//! Standard output, for programs and pipes.

use std::io::{ErrorKind, Write};

/// Writes a text at once. A closed pipe ends the program quietly; a full disk ends it with one line
/// and exit code 1.
pub fn write(text: &str) {
    let mut stdout = std::io::stdout();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        eprintln!("fireclay: standard output: {error}");
        std::process::exit(1);
    }
}

/// Writes a line at once, as [`write`](write()) does.
pub fn line(line: impl std::fmt::Display) {
    write(&format!("{line}\n"));
}
