//! Files that are written whole or not at all.

use std::fs::{self, File};
use std::path::Path;

use crate::error::WeightsError;

/// Writes a file under a temporary name, syncs it and renames it to `path`.
pub(crate) fn write_synced(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), WeightsError> {
    let partial = path.with_extension("partial");
    let written =
        write(&partial).and_then(|()| File::open(&partial)?.sync_all()).and_then(|()| fs::rename(&partial, path));
    written.map_err(|error| {
        // Report the first error; the file that is left may not exist.
        let _ = fs::remove_file(&partial);
        WeightsError::Io { path: path.to_path_buf(), error }
    })
}
