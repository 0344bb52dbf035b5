//! Tokens of the texts that runs learn from, kept in the user's cache folder: made once for a text and a tokenizer.
//!
//! ```text
//! <cache>/fireclay/tokens/TEXT-HASH/      a folder of token files for each text and tokenizer
//! <cache>/fireclay/inputs/HASH.json       how the files of a text looked, and their sha256
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use fireclay_datasets::{DataError, Inputs, PrepareOptions, TextSource, TokenFiles, Tokenizer, prepare};
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::progress::Watch;
use crate::recipe::schema::DataRecipe;
use crate::run_folder::write_atomic;

/// The tokens of the text in `path`, by `tokenizer`: those that were prepared, if it is a folder of them, else those in the cache,
/// which are made where they are not there.
///
/// # Errors
/// If the text cannot be read, tokens that were prepared are by another tokenizer or hold out other documents, the cache cannot be
/// written, or `watch` stops it.
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

/// Where the tokens of a text are kept.
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

/// What is in `path`: files that look as they did when they were last read are not read again.
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
        // What cannot be remembered is read again the next time.
        let _ = file.parent().map_or(Ok(()), fs::create_dir_all);
        let _ = write_atomic(&file, serde_json::to_string(&inputs).unwrap_or_default().as_bytes());
    }
    Ok(inputs)
}
