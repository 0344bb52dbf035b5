//! Cache of tokenized data in the user's cache folder, one entry per data and tokenizer.
//!
//! ```text
//! <cache>/fireclay/tokens/TEXT-HASH/      token files of each data and tokenizer
//! <cache>/fireclay/inputs/HASH.json       sizes, times and sha256 of the data's files
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use fireclay_datasets::{DataError, Inputs, PrepareOptions, TextSource, TokenFiles, Tokenizer, prepare};
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::progress::Watch;
use crate::recipe::schema::DataRecipe;
use crate::run_folder::write_atomic;

/// The tokens of the data in `path` by `tokenizer`: prepared ones if it is a folder of them, else
/// from the cache, which is filled if need be.
///
/// # Errors
/// If the data cannot be read, prepared tokens have another tokenizer or holdout, the cache cannot
/// be written, or `watch` stops it.
pub(crate) fn tokens(
    path: &Path,
    tokenizer: &Tokenizer,
    data: &DataRecipe,
    watch: Watch<'_>,
) -> Result<TokenFiles, Failure> {
    let shown = path.display();
    let held_out_documents = data.holdout_by.documents().then_some(data.holdout);
    if TokenFiles::are_in(path) {
        let files = TokenFiles::open(path)?;
        if files.manifest().tokenizer_sha256 != tokenizer.sha256()? {
            return Err(Failure::new(format!(
                "{shown}: it was prepared with another tokenizer: prepare it with the run's tokenizer.json"
            )));
        }
        if files.manifest().held_out_documents != held_out_documents {
            let wanted = match files.manifest().held_out_documents {
                Some(share) => format!("holdout_by=document and holdout={share}"),
                None => "holdout_by=tail".to_string(),
            };
            return Err(Failure::new(format!("{shown} was prepared for {wanted}: set them, or prepare it again")));
        }
        return Ok(files);
    }
    let source = TextSource::open(path, &data.field)?;
    let folder = place(path, tokenizer, data)?;
    let options = PrepareOptions { held_out_documents, ..PrepareOptions::default() };
    let made = prepare(&source, tokenizer, &folder, options, &mut |progress| watch(path, progress));
    made.map_err(|error| match error {
        DataError::Io { path, error } if path.starts_with(&folder) => {
            let mend = "free some space, or set XDG_CACHE_HOME to a folder on another disk";
            Failure::new(format!("{}: cannot cache tokens: {error}; {mend}, and run this again", path.display()))
        }
        error => error.into(),
    })
}

/// The cache folder of some data.
fn place(path: &Path, tokenizer: &Tokenizer, data: &DataRecipe) -> Result<PathBuf, Failure> {
    let full = fs::canonicalize(path).map_err(Failure::io(path))?;
    let name = full.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = name.chars().map(plain).take(40).collect();
    let made = (full.display().to_string(), tokenizer.sha256()?, &data.field, data.holdout_by, data.holdout.to_bits());
    let by = if data.holdout_by.documents() { format!("{made:?}") } else { format!("{:?}", (made.0, made.1, made.2)) };
    Ok(cache()?.join("tokens").join(format!("{name}-{}", short_hash(&by))))
}

fn short_hash(text: &str) -> String {
    Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

fn cache() -> Result<PathBuf, Failure> {
    let folder = dirs::cache_dir().map(|folder| folder.join("fireclay"));
    folder.ok_or_else(|| Failure::new("no cache folder for tokens: set XDG_CACHE_HOME"))
}

/// The inputs of `path`. Files with unchanged size and time are not hashed again.
///
/// # Errors
/// If something cannot be read.
pub(crate) fn inputs(path: &Path, known: Option<&Inputs>) -> Result<Inputs, Failure> {
    let full = fs::canonicalize(path).map_err(Failure::io(path))?;
    let file = cache().ok().map(|cache| {
        let name = short_hash(&full.display().to_string());
        cache.join("inputs").join(format!("{name}.json"))
    });
    let remembered = || {
        let text = fs::read_to_string(file.as_ref()?).ok()?;
        serde_json::from_str::<Inputs>(&text).ok()
    };
    let known = known.cloned().or_else(remembered);
    let inputs = Inputs::of(path, known.as_ref())?;
    if let Some(file) = file.filter(|_| known.as_ref() != Some(&inputs)) {
        // Without this record, it is read again next time.
        let _ = file.parent().map_or(Ok(()), fs::create_dir_all);
        let _ = write_atomic(&file, serde_json::to_string(&inputs).unwrap_or_default().as_bytes());
    }
    Ok(inputs)
}
