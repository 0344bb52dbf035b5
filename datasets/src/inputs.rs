//! Fingerprints of a run's input files, to notice when they change.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::DataError;
use crate::sources::collect;

/// A file or folder, and its fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// Its full path.
    pub path: PathBuf,
    /// Hash of its bytes; for a folder, of its files' names and bytes in the order of their paths.
    pub sha256: String,
    /// Its files' metadata when they were read; files with the same metadata are not read again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    files: Vec<Look>,
}

/// A file's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Look {
    /// Path below the folder; empty for a single file.
    name: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: u128,
}

impl Inputs {
    /// The current state of a file or folder. Files whose metadata match `known` are assumed
    /// unchanged.
    ///
    /// # Errors
    /// If something cannot be read.
    pub fn of(path: &Path, known: Option<&Self>) -> Result<Self, DataError> {
        let refused = |path: &Path, error| DataError::Io { path: path.to_path_buf(), error };
        let full = fs::canonicalize(path).map_err(|error| refused(path, error))?;
        let (mut found, mut files) = (Vec::new(), Vec::new());
        collect(&full, &mut found)?;
        for file in &found {
            let meta = fs::metadata(file).map_err(|error| refused(file, error))?;
            let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let name = file.strip_prefix(&full).unwrap_or(file).to_path_buf();
            files.push(Look { name, bytes: meta.len(), modified: modified.map_or(0, |time| time.as_nanos()) });
        }
        if let Some(known) = known.filter(|known| known.path == full && known.files == files) {
            return Ok(known.clone());
        }
        let mut hash = Sha256::new();
        for file in &found {
            if full.is_dir() {
                hash.update(file.strip_prefix(&full).unwrap_or(file).to_string_lossy().as_bytes());
                hash.update([0]);
            }
            add(&mut hash, file).map_err(|error| refused(file, error))?;
        }
        Ok(Self { path: full, sha256: hex(&hash.finalize()), files })
    }
}

fn add(hash: &mut Sha256, file: &Path) -> std::io::Result<()> {
    let mut open = File::open(file)?;
    let mut bytes = vec![0; 1 << 20];
    loop {
        match open.read(&mut bytes)? {
            0 => return Ok(()),
            count => hash.update(&bytes[..count]),
        }
    }
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_names_count_and_looks_do_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.txt"));
        let of = |path: &Path| Inputs::of(path, None).expect("readable").sha256;
        fs::write(&a, "one").expect("writable");
        fs::write(&b, "one").expect("writable");
        assert_eq!(of(&a), of(&b));
        let whole = of(folder.path());
        assert_eq!(whole, of(folder.path()));
        fs::rename(&b, folder.path().join("c.txt")).expect("writable");
        assert_ne!(whole, of(folder.path()));
        fs::write(&a, "two").expect("writable");
        assert_ne!(of(&a), of(&folder.path().join("c.txt")));
    }

    #[test]
    fn files_that_look_the_same_are_not_read_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.txt");
        fs::write(&path, "one").expect("writable");
        let mut known = Inputs::of(&path, None).expect("readable");
        known.sha256 = "as it was".into();
        assert_eq!(Inputs::of(&path, Some(&known)).expect("readable"), known);
        fs::write(&path, "longer").expect("writable");
        assert_ne!(Inputs::of(&path, Some(&known)).expect("readable").sha256, "as it was");
    }
}
