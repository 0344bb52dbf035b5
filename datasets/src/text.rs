//! Reading text from a file or a folder of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::DataError;

/// The text of a file, or of all files in a folder and the folders below it, in the order of their names, joined by
/// line breaks. Hidden files are left out.
///
/// # Errors
/// If something is missing or unreadable, a file is not UTF-8 text, or there is no text at all.
pub fn read_text(path: &Path) -> Result<String, DataError> {
    let mut files = Vec::new();
    collect(path, &mut files)?;
    let mut text = String::new();
    for file in files {
        let part = read_file(&file)?;
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(&part);
    }
    if text.trim().is_empty() {
        return Err(DataError::Empty { path: path.to_path_buf() });
    }
    Ok(text)
}

/// The text of one file.
pub(crate) fn read_file(path: &Path) -> Result<String, DataError> {
    let binary = |byte| DataError::Binary { path: path.to_path_buf(), byte };
    let bytes = fs::read(path).map_err(|error| DataError::Io { path: path.to_path_buf(), error })?;
    if let Some(byte) = bytes.iter().position(|byte| *byte == 0) {
        return Err(binary(byte));
    }
    String::from_utf8(bytes).map_err(|error| binary(error.utf8_error().valid_up_to()))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), DataError> {
    let refused = |error| DataError::Io { path: path.to_path_buf(), error };
    if !fs::metadata(path).map_err(refused)?.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(refused)? {
        let entry = entry.map_err(refused)?;
        if !entry.file_name().to_string_lossy().starts_with('.') {
            entries.push(entry.path());
        }
    }
    entries.sort();
    entries.iter().try_for_each(|entry| collect(entry, files))
}
