//! The files of a model: one, or several parts.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::header::{self, Header};
use super::metadata::Metadata;
use crate::config::ConfigError;
use crate::error::WeightsError;
use crate::tensor_files::{StoredTensor, TensorFiles};

/// Keys of parts: index, number of parts, and number of tensors in all parts.
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Reads the headers of a model's files.
///
/// # Errors
/// If a file is missing, truncated or damaged, or is not the part that its name says.
pub(super) fn open(path: &Path) -> Result<(Metadata, TensorFiles), WeightsError> {
    let (file, Header { metadata, tensors }) = read(path)?;
    let size = |metadata: &Metadata, path: &Path, key: &str| metadata.size(key).map_err(at(path));
    let count = size(&metadata, path, COUNT)?.unwrap_or(1).max(1);
    let number = size(&metadata, path, NUMBER)?.unwrap_or(0);
    let mut parts = vec![(path.to_path_buf(), file, tensors)];
    if count > 1 {
        let wrong = |reason: String| WeightsError::Weights { path: path.into(), reason };
        let name = |part: u32| named(path, part, count);
        let Some(first) = name(0) else {
            let suffix = suffix(number, count);
            return Err(wrong(format!("part {} of {count}, but its name does not end in {suffix}", number + 1)));
        };
        if number != 0 {
            let shown = first.display();
            return Err(wrong(format!("part {} of {count}: give the first one, {shown}", number + 1)));
        }
        for part in 1..count {
            // `name` succeeded for the first part, so it does here.
            let Some(path) = name(part) else { continue };
            if !path.exists() {
                return Err(wrong(format!("part {} of {count} is missing: {}", part + 1, path.display())));
            }
            let (file, header) = read(&path)?;
            let is = (size(&header.metadata, &path, NUMBER)?, size(&header.metadata, &path, COUNT)?);
            if is != (Some(part), Some(count)) {
                let reason = format!("is not part {} of {count} of a model", part + 1);
                return Err(WeightsError::Weights { path, reason });
            }
            parts.push((path, file, header.tensors));
        }
        let found: usize = parts.iter().map(|(.., tensors)| tensors.len()).sum();
        if let Some(all) = size(&metadata, path, TENSORS)?.filter(|all| *all as usize != found) {
            return Err(wrong(format!("its parts have {found} tensors instead of {all}")));
        }
    }
    let (mut files, mut tensors) = (Vec::new(), BTreeMap::new());
    for (path, file, described) in parts {
        for tensor in described {
            let stored = StoredTensor::new(files.len(), tensor.start, tensor.encoding, tensor.shape);
            if tensors.insert(tensor.name.clone(), stored).is_some() {
                let reason = format!("its header is damaged: duplicate tensor {}", tensor.name);
                return Err(WeightsError::Weights { path, reason });
            }
        }
        files.push((path, file));
    }
    Ok((metadata, TensorFiles::new(files, tensors)))
}

fn read(path: &Path) -> Result<(File, Header), WeightsError> {
    let file = File::open(path).map_err(|error| WeightsError::Io { path: path.into(), error })?;
    let header = header::read(path, &file)?;
    Ok((file, header))
}

fn at(path: &Path) -> impl Fn(ConfigError) -> WeightsError + '_ {
    move |error| WeightsError::Config { path: path.into(), error }
}

/// The suffix of a part's name. Names count from 1.
fn suffix(part: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", u64::from(part) + 1)
}

/// The path of a part, from the path of any part.
fn named(path: &Path, part: u32, count: u32) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.get(..name.len().checked_sub(suffix(0, count).len())?)?;
    let is_part = (0..count).any(|part| name[stem.len()..] == suffix(part, count));
    is_part.then(|| path.with_file_name(format!("{stem}{}", suffix(part, count))))
}
