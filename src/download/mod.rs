//! Model and dataset folders, downloaded from the hub when given by name.
//!
//! `OWNER/NAME:Q4_K_M` selects a GGUF file of a repository by quantization. Files are stored in the
//! hub's usual cache: `HF_HUB_CACHE`, or else `hub` in `HF_HOME`. Once they are there, no network
//! is needed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use client::{Client, FetchError};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::progress::Line;
use crate::run_folder::{checkpoints, model_file};

mod client;
mod gguf;

/// Required files of a model.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Optional files of a model.
const OPTIONAL: [&str; 5] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "labels.json",
];
/// Folder of additional chat templates.
const TEMPLATES: &str = "additional_chat_templates/";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Maximum resumptions of an interrupted file.
const RETRIES: u32 = 5;
/// Time without data after which a transfer counts as interrupted.
const STALL: Duration = Duration::from_secs(60);
/// How often, once a second, to check for a file that another process downloads.
const LOCK_TRIES: usize = 5;
/// Size from which a download shows its progress, in bytes.
const LARGE: u64 = 1 << 20;

/// Called with a file's name, the bytes received, and its size.
pub type FileProgress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Why a model could not be downloaded.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// The hub cannot be reached.
    #[error("cannot reach {endpoint} to fetch {model}: {cause}; put its files in {folder} or give a folder")]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// The model, as given.
        model: String,
        /// What went wrong.
        cause: String,
        /// The folder for its files.
        folder: PathBuf,
    },
    /// The hub does not provide the model, or the cache is not usable.
    #[error("{model}: {reason}")]
    Refused {
        /// The model, as given.
        model: String,
        /// The reason, with a remedy.
        reason: String,
    },
    /// An index is invalid.
    #[error("{path}: {reason}")]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder holds a run that stopped before it saved a model.
    #[error(
        "{folder} holds a run stopped at step {step}, before its first model was saved: continue it with `fireclay \
         train --resume --out {folder}`"
    )]
    Unfinished {
        /// The run's folder.
        folder: PathBuf,
        /// The step of its last checkpoint.
        step: u64,
    },
}

impl From<DownloadError> for Failure {
    fn from(error: DownloadError) -> Self {
        Self::new(error.to_string())
    }
}

/// The folder of a model: `model` itself if it exists. Else, for `owner/name` or
/// `owner/name@revision`, its folder in the hub's cache, with missing files downloaded. For
/// `owner/name:Q4_K_M` or `owner/name@revision:Q4_K_M`, the GGUF file with that in its name, or the
/// first of its parts.
///
/// # Errors
/// If files are missing and the hub cannot be reached or does not provide them, the cache cannot
/// be written, or the folder holds a run that stopped before it saved a model.
pub fn model_folder(model: &Path, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
    match HubModel::parse(model) {
        Some(wanted) if !model.exists() => Hub::new(wanted, |name| std::env::var_os(name))?.fetch(progress),
        _ => match checkpoints(model).last() {
            Some((step, _)) if model_file(model).is_none() => {
                Err(DownloadError::Unfinished { folder: model.to_path_buf(), step: *step })
            }
            _ => Ok(model.to_path_buf()),
        },
    }
}

/// The folder of a dataset: `data` itself if it exists. Else, for `owner/name` or
/// `owner/name@revision`, its folder in the hub's cache, with the Parquet, JSON lines or text files
/// of the training split downloaded.
///
/// # Errors
/// As [`model_folder`].
pub fn dataset_folder(data: &Path, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
    match HubModel::parse(data) {
        Some(wanted) if !data.exists() && wanted.quantization.is_none() => {
            let wanted = HubModel { kind: Kind::Dataset, ..wanted };
            Hub::new(wanted, |name| std::env::var_os(name))?.fetch_dataset(progress)
        }
        _ => Ok(data.to_path_buf()),
    }
}

/// Shows the download progress of large files on a terminal, and clears it at the end.
pub fn show_fetching() -> impl FnMut(&str, u64, u64) {
    let (terminal, mut line) = (io::stderr().is_terminal(), Line::default());
    move |file, done, total| {
        if terminal && total >= LARGE {
            line.show(if done < total { fetching(file, done, total) } else { String::new() });
        }
    }
}

fn fetching(file: &str, done: u64, total: u64) -> String {
    let percent = 100.0 * done as f64 / total.max(1) as f64;
    let (unit, name) = if total < 1_000_000_000 { (1e6, "MB") } else { (1e9, "GB") };
    format!("fetching {file}: {:>3}% of {:.2} {name}", percent.floor(), total as f64 / unit)
}

/// A kind of repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Dataset,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }

    /// Path prefix in URLs.
    fn prefix(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
        }
    }
}

/// The name of a model or dataset on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HubModel {
    kind: Kind,
    asked: String,
    id: String,
    revision: String,
    /// Part of the name of the wanted GGUF file.
    quantization: Option<String>,
}

impl HubModel {
    fn parse(model: &Path) -> Option<Self> {
        let asked = model.to_str()?;
        let (named, quantization) = match asked.split_once(':') {
            Some((named, quantization)) => (named, Some(quantization)),
            None => (asked, None),
        };
        let (id, revision) = named.split_once('@').unwrap_or((named, "main"));
        let (owner, name) = id.split_once('/')?;
        // A path to a missing file, not a name.
        let legal = is_plain(owner) && is_plain(name) && !name.ends_with(".gguf");
        let legal = legal && revision.split('/').all(is_plain) && quantization.is_none_or(is_plain);
        legal.then(|| Self {
            kind: Kind::Model,
            asked: asked.into(),
            id: id.into(),
            revision: revision.into(),
            quantization: quantization.map(String::from),
        })
    }

    fn refused(&self, reason: String) -> DownloadError {
        DownloadError::Refused { model: self.asked.clone(), reason }
    }
}

/// Whether it is a valid name, without path traversal.
fn is_plain(name: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.bytes().all(legal)
}

/// The sha256 in a large file's ETag.
fn sha256(etag: &str) -> Option<&str> {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (etag.len() == 64 && etag.bytes().all(hex)).then_some(etag)
}

/// A repository on the hub, and its cache.
struct Hub {
    model: HubModel,
    client: Client,
    /// The cache folder.
    cache: PathBuf,
    endpoint: String,
    token: Option<String>,
    token_file: PathBuf,
    /// Delay before the first retry; doubles each time.
    pause: Duration,
}

/// The hub's metadata of a revision.
struct Listing {
    commit: String,
    files: BTreeSet<String>,
}

impl Hub {
    /// The hub configured by environment variables.
    fn new(model: HubModel, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, DownloadError> {
        let variable = |name| variable(name).filter(|value| !value.is_empty());
        let path = |name| variable(name).map(PathBuf::from);
        let text = |name| variable(name).map(|value| value.to_string_lossy().trim().to_string());
        let caches = || path("XDG_CACHE_HOME").or_else(|| Some(dirs::home_dir()?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let home = home.ok_or_else(|| model.refused("no home folder for the cache: set HF_HOME".into()))?;
        let cache = path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let written = || Some(fs::read_to_string(&token_file).ok()?.trim().to_string());
        let token = text("HF_TOKEN").or_else(written).filter(|token| !token.is_empty());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        let client = Client::new(&endpoint, token.clone(), STALL);
        let client = client.map_err(|error| model.refused(format!("HF_ENDPOINT: {error}")))?;
        Ok(Self { model, client, cache, endpoint, token, token_file, pause: Duration::from_secs(1) })
    }

    /// The repository's folder in the cache, in the hub's layout.
    fn repo(&self) -> PathBuf {
        self.cache.join(format!("{}s--{}", self.model.kind.as_str(), self.model.id.replace('/', "--")))
    }

    /// The folder of a commit's files.
    fn snapshot(&self, commit: &str) -> PathBuf {
        self.repo().join("snapshots").join(commit)
    }

    /// The file that stores the commit of the revision.
    fn reference(&self) -> PathBuf {
        self.repo().join("refs").join(&self.model.revision)
    }

    /// The folder where the model's files are looked for.
    fn folder(&self) -> PathBuf {
        let commit = fs::read_to_string(self.reference()).unwrap_or_default();
        self.snapshot(Some(commit.trim()).filter(|commit| is_plain(commit)).unwrap_or(&self.model.revision))
    }

    fn fetch(&self, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
        if let Some(wanted) = &self.model.quantization {
            return self.fetch_gguf(wanted, progress);
        }
        let folder = self.folder();
        if is_complete(&folder) {
            return Ok(folder);
        }
        let Listing { commit, files } = self.listing()?;
        let listed = |file: &&str| files.contains(*file);
        let weights = if !listed(&SINGLE) && listed(&INDEX) { INDEX } else { SINGLE };
        if let Some(file) = REQUIRED.iter().chain([&weights]).find(|file| !listed(file)) {
            let there = gguf::first_parts(files.iter().map(String::as_str)).join(", ");
            let instead = match there.is_empty() {
                true => String::new(),
                false => format!("; {}:QUANTIZATION is one of its GGUF files: {there}", self.model.asked),
            };
            return Err(self.model.refused(format!("{} has this model, but without {file}{instead}", self.endpoint)));
        }
        let templates = files.iter().map(String::as_str).filter(|file| is_template(file));
        for file in REQUIRED.into_iter().chain(OPTIONAL.into_iter().filter(listed)).chain(templates).chain([weights]) {
            self.file(&commit, file, progress)?;
        }
        let folder = self.snapshot(&commit);
        if weights == INDEX {
            for shard in shards(&folder.join(INDEX))? {
                self.file(&commit, &shard, progress)?;
            }
        }
        self.refer(&commit)?;
        Ok(folder)
    }

    /// The GGUF file with `wanted` in its name, with the other parts of its model.
    fn fetch_gguf(&self, wanted: &str, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
        let folder = self.folder();
        let there = files_in(&folder);
        if let Ok(Some(first)) =
            gguf::chosen(there.iter().map(String::as_str), wanted).map(|parts| parts.first().copied())
        {
            return Ok(folder.join(first));
        }
        let Listing { commit, files } = self.listing()?;
        let parts = gguf::chosen(files.iter().map(String::as_str), wanted)
            .map_err(|reason| self.model.refused(format!("of this model on {}, {reason}", self.endpoint)))?;
        for file in &parts {
            self.file(&commit, file, progress)?;
        }
        self.refer(&commit)?;
        Ok(self.snapshot(&commit).join(parts.first().copied().unwrap_or_default()))
    }

    fn fetch_dataset(&self, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
        // A complete snapshot has this name; others were interrupted.
        if self.reference().is_file() && self.folder().is_dir() {
            return Ok(self.folder());
        }
        let Listing { commit, files } = self.listing()?;
        let chosen = text_files(&files);
        if chosen.is_empty() {
            let reason = format!("{} has this dataset, but without Parquet, JSON lines or text", self.endpoint);
            return Err(self.model.refused(reason));
        }
        for file in chosen {
            self.file(&commit, file, progress)?;
        }
        self.refer(&commit)?;
        Ok(self.snapshot(&commit))
    }

    /// Stores the commit of the revision.
    fn refer(&self, commit: &str) -> Result<(), DownloadError> {
        let reference = self.reference();
        let named = reference.parent().map_or(Ok(()), fs::create_dir_all);
        named.and_then(|()| fs::write(&reference, commit)).map_err(|error| self.explain(None, error.into()))
    }

    /// The revision's current commit, and its files.
    fn listing(&self) -> Result<Listing, DownloadError> {
        let (kind, id) = (self.model.kind.as_str(), &self.model.id);
        let path = format!("/api/{kind}s/{id}/revision/{}", self.model.revision.replace('/', "%2F"));
        let ask = || Ok(self.client.get(&path, None)?.response.body_mut().read_to_string()?);
        let text = self.patiently(ask).map_err(|error| self.explain(None, error))?;
        let listing = |json: Value| {
            let commit = json["sha"].as_str().filter(|commit| is_plain(commit))?.to_string();
            let name = |file: &Value| file["rfilename"].as_str().map(String::from);
            Some(Listing { commit, files: json["siblings"].as_array()?.iter().filter_map(name).collect() })
        };
        let reason = || format!("{} is not a hub, or needs a login", self.endpoint);
        serde_json::from_str(&text).ok().and_then(listing).ok_or_else(|| self.model.refused(reason()))
    }

    /// Downloads a file of a commit unless it exists.
    fn file(&self, commit: &str, file: &str, progress: FileProgress<'_>) -> Result<(), DownloadError> {
        let fetched = self.patiently(|| self.attempt(commit, file, progress));
        fetched.map_err(|error| self.explain(Some(file), error))
    }

    /// Retries with increasing delays after temporary errors.
    fn patiently<T>(&self, mut work: impl FnMut() -> Result<T, FetchError>) -> Result<T, FetchError> {
        let mut tries = 0;
        loop {
            match work() {
                Err(error) if tries < RETRIES && error.is_passing() => thread::sleep(self.pause * (1 << tries)),
                done => return done,
            }
            tries += 1;
        }
    }

    /// Downloads the missing part of a file to a blob named by its ETag, and links to it.
    fn attempt(&self, commit: &str, file: &str, progress: FileProgress<'_>) -> Result<(), FetchError> {
        let pointer = self.snapshot(commit).join(file);
        if pointer.exists() {
            return Ok(());
        }
        let path = format!("/{}{}/resolve/{commit}/{file}", self.model.kind.prefix(), self.model.id);
        let answer = self.client.get(&path, Some("bytes=0-0"))?;
        if answer.commit.as_deref() != Some(commit) {
            return Err(FetchError::Header("x-repo-commit"));
        }
        let size = answer.total_size()?;
        let etag = answer.etag.filter(|etag| is_plain(etag)).ok_or(FetchError::Header("etag"))?;
        let blobs = self.repo().join("blobs");
        let blob = blobs.join(&etag);
        fs::create_dir_all(&blobs)?;
        fs::create_dir_all(pointer.parent().unwrap_or(&pointer))?;
        let _lock = lock(blobs.join(format!("{etag}.lock")))?;
        if length(&blob) != Some(size) {
            let part = blobs.join(format!("{etag}.part"));
            self.transfer(&path, Described { file, size, sha256: sha256(&etag) }, &part, progress)?;
            fs::rename(&part, &blob)?;
        }
        link(&etag, &blob, &pointer, file.matches('/').count())
    }

    /// Resumes a file and verifies the whole.
    fn transfer(
        &self,
        path: &str,
        described: Described<'_>,
        part: &Path,
        progress: FileProgress<'_>,
    ) -> Result<(), FetchError> {
        let Described { file, size, sha256 } = described;
        let mut output = File::options().create(true).read(true).append(true).open(part)?;
        let (mut done, mut hash) = (output.metadata()?.len(), Sha256::new());
        if done > size {
            output.set_len(0)?;
            done = 0;
        } else if sha256.is_some() {
            io::copy(&mut output, &mut hash)?;
        }
        if done < size {
            let mut answer = self.client.get(path, Some(&format!("bytes={done}-")))?;
            match answer.begin()? {
                begin if begin == done => {}
                // A host without range support sends the whole file: start over.
                0 => {
                    output.set_len(0)?;
                    (done, hash) = (0, Sha256::new());
                }
                _ => return Err(FetchError::Header("content-range")),
            }
            let (mut input, mut buffer) = (answer.response.body_mut().as_reader(), vec![0; 1 << 16]);
            progress(file, done, size);
            loop {
                let read = input.read(&mut buffer)?;
                if read == 0 {
                    break;
                }
                if done + read as u64 > size {
                    output.set_len(0)?;
                    return Err(
                        io::Error::new(ErrorKind::InvalidInput, format!("received more than {size} bytes")).into()
                    );
                }
                output.write_all(&buffer[..read])?;
                hash.update(&buffer[..read]);
                done += read as u64;
                progress(file, done, size);
            }
        }
        if done != size {
            let what = format!("received {done} bytes instead of {size}");
            return Err(io::Error::new(ErrorKind::UnexpectedEof, what).into());
        }
        if let Some(expected) = sha256 {
            let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            if found != expected {
                fs::remove_file(part)?;
                return Err(FetchError::Hash { expected: expected.into(), found });
            }
        }
        Ok(output.sync_all()?)
    }

    /// The error for the user, for the repository or, once that is known, for `file`.
    fn explain(&self, file: Option<&str>, error: FetchError) -> DownloadError {
        let (endpoint, id, folder) = (&self.endpoint, &self.model.id, self.folder());
        let kind = self.model.kind.as_str();
        let mend = format!("set HF_TOKEN or write a token to {}", self.token_file.display());
        let cause = error.to_string();
        self.model.refused(match (error.status(), file) {
            (Some(401), None) if self.token.is_none() => {
                format!("no such folder, and {endpoint} has no public {kind} of this name: if it is private, {mend}")
            }
            (Some(401), None) => format!("{endpoint} rejects the token: {mend} that is valid"),
            (Some(401 | 403), _) => {
                format!("access is restricted: ask for it at {endpoint}/{}{id}, then {mend}", self.model.kind.prefix())
            }
            (Some(404), None) => format!("no such folder, and {endpoint} has no such {kind} or revision"),
            (None, None) if matches!(error, FetchError::Network(_)) => {
                let (endpoint, model) = (endpoint.clone(), self.model.asked.clone());
                return DownloadError::Unreachable { endpoint, model, cause, folder };
            }
            (_, Some(file)) if error.is_passing() => {
                format!("fetching {file} failed: {cause}; run the same command again to continue")
            }
            (_, Some(file)) => format!("cannot fetch {file} from {endpoint} to {}: {cause}", folder.display()),
            (_, None) => format!("cannot query {endpoint} for {id}: {cause}"),
        })
    }
}

/// The hub's metadata of a file.
struct Described<'a> {
    file: &'a str,
    /// Bytes.
    size: u64,
    sha256: Option<&'a str>,
}

/// Locks a file while the returned handle lives; the system frees the lock when the process dies.
fn lock(path: PathBuf) -> Result<File, FetchError> {
    let file = File::create(&path)?;
    for tried in 0.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if tried < LOCK_TRIES => thread::sleep(Duration::from_secs(1)),
            Err(TryLockError::WouldBlock) => return Err(FetchError::Locked(path)),
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
    }
    Ok(file)
}

/// Links a blob into a snapshot, in the hub's layout.
fn link(etag: &str, blob: &Path, pointer: &Path, depth: usize) -> Result<(), FetchError> {
    // A dangling link is present but does not "exist".
    if fs::symlink_metadata(pointer).is_ok() {
        fs::remove_file(pointer)?;
    }
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(Path::new(&"../".repeat(2 + depth)).join("blobs").join(etag), pointer);
    #[cfg(not(unix))]
    let linked = Err(io::Error::from(ErrorKind::Unsupported));
    // Not every file system supports links.
    let copy = || {
        let partial = pointer.with_extension("partial");
        fs::copy(blob, &partial).and_then(|_| fs::rename(&partial, pointer))
    };
    Ok(linked.or_else(|_| fs::hard_link(blob, pointer)).or_else(|_| copy())?)
}

/// The text files of a dataset; of its training split, if names tell splits apart.
fn text_files(files: &BTreeSet<String>) -> Vec<&str> {
    let is_text = |file: &&str| {
        let inner = file.strip_suffix(".gz").or_else(|| file.strip_suffix(".zst")).unwrap_or(file);
        let known = [".parquet", ".jsonl", ".ndjson", ".txt"].iter().any(|end| inner.ends_with(end));
        known && file.split('/').all(is_plain)
    };
    let found: Vec<&str> = files.iter().map(String::as_str).filter(is_text).collect();
    let has = |file: &str, part: &str| file.to_lowercase().split(['/', '-', '_', '.']).any(|word| word == part);
    let train: Vec<&str> = found.iter().copied().filter(|file| has(file, "train")).collect();
    let held_out = |file: &&str| ["test", "valid", "validation", "dev"].iter().any(|part| has(file, part));
    // One of several formats is enough, and a README is not data.
    let chosen = if train.is_empty() { found.into_iter().filter(|file| !held_out(file)).collect() } else { train };
    let of = |ending: &str| -> Vec<&str> { chosen.iter().copied().filter(|file| file.contains(ending)).collect() };
    [of(".parquet"), of(".jsonl"), of(".ndjson"), of(".txt")].into_iter().find(|of| !of.is_empty()).unwrap_or_default()
}

/// Whether a file is an additional chat template.
fn is_template(file: &str) -> bool {
    let name = file.strip_prefix(TEMPLATES).and_then(|name| name.strip_suffix(".jinja"));
    name.is_some_and(|name| !name.contains('/') && is_plain(name))
}

/// The files of a snapshot, by their paths in the repository.
fn files_in(folder: &Path) -> BTreeSet<String> {
    let entries = |folder: &Path| -> Vec<(PathBuf, String)> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.path(), entry.file_name().into_string().ok()?))).collect()
    };
    let mut files = BTreeSet::new();
    for (path, name) in entries(folder) {
        let inner = if path.is_dir() { entries(&path) } else { Vec::new() };
        files.extend(inner.into_iter().filter(|(path, _)| path.is_file()).map(|(_, inner)| format!("{name}/{inner}")));
        // Skip dangling links.
        files.extend(path.is_file().then_some(name));
    }
    files
}

fn length(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.len())
}

/// Whether a folder has all required files.
fn is_complete(folder: &Path) -> bool {
    let stored = |file: &str| folder.join(file).exists();
    let sharded = || shards(&folder.join(INDEX)).is_ok_and(|shards| shards.iter().all(|shard| stored(shard)));
    REQUIRED.into_iter().all(stored) && (stored(SINGLE) || sharded())
}

/// The files that an index names.
fn shards(index: &Path) -> Result<BTreeSet<String>, DownloadError> {
    let wrong = |reason: String| DownloadError::Index { path: index.into(), reason };
    let text = fs::read_to_string(index).map_err(|error| wrong(error.to_string()))?;
    let json: Value = serde_json::from_str(&text).map_err(|error| wrong(format!("not valid JSON: {error}")))?;
    let named = json["weight_map"].as_object().ok_or_else(|| wrong("weight_map is missing".into()))?;
    let shard = |name: &Value| {
        let plain = name.as_str().filter(|name| is_plain(name)).map(String::from);
        plain.ok_or_else(|| wrong(format!("{name} is not a file's name")))
    };
    named.values().map(shard).collect()
}

#[cfg(test)]
mod tests;
