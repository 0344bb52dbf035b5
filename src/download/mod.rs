//! A model's folder, fetched from the hub where only its name is given.
//!
//! Files go where every program of the hub keeps them: `HF_HUB_CACHE`, or else `hub` in `HF_HOME`. Once they are there,
//! no network is needed.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::api::{Progress, RepoInfo};
use hf_hub::{Cache, Repo, RepoType};
use serde_json::Value;

use crate::failure::Failure;

/// Files without which there is no model.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
/// Files that some models have.
const OPTIONAL: [&str; 4] = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "labels.json"];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// How often a file that breaks off is taken up again.
const RETRIES: u32 = 5;
/// Time for the hub's first answer.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a file from which on its download is shown.
const LARGE: u64 = 1 << 20;

/// Is told a file, the bytes of it that are there, and all of its bytes.
pub type FileProgress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Why a model could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    /// There is no way to the hub.
    #[error("cannot reach {endpoint} to fetch {model}: {cause}; put its files in {folder} or give a folder")]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// The model, as it was asked for.
        model: String,
        /// What went wrong.
        cause: String,
        /// Where its files are looked for.
        folder: PathBuf,
    },
    /// The hub does not give the model, or not all of it, or there is no place for it.
    #[error("{model}: {reason}")]
    Refused {
        /// The model, as it was asked for.
        model: String,
        /// Why, and what helps.
        reason: String,
    },
    /// An index does not say which files there are.
    #[error("{path}: {reason}")]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl From<DownloadError> for Failure {
    fn from(error: DownloadError) -> Self {
        Self::new(error.to_string())
    }
}

/// The folder of a model: `model` itself, or, where that does not exist and is an `owner/name` or
/// `owner/name@revision` of the hub, the one in the hub's cache, its files fetched where they are missing.
///
/// # Errors
/// If files are missing and the hub cannot be reached or does not give them, or the cache cannot be written.
pub fn model_folder(model: &Path, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
    match HubModel::parse(model) {
        Some(wanted) if !model.exists() => Hub::new(wanted, |name| std::env::var_os(name))?.fetch(progress),
        _ => Ok(model.to_path_buf()),
    }
}

/// Shows on a terminal how much of a large file is there, and nothing more when all of it is.
pub fn show_fetching() -> impl FnMut(&str, u64, u64) {
    let (terminal, mut line) = (io::stderr().is_terminal(), Line(String::new()));
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

/// What a terminal's last line shows; cleared in the end.
struct Line(String);

impl Line {
    fn show(&mut self, text: String) {
        if text != self.0 {
            let line = format!("\r{:width$}\r{text}", "", width = self.0.chars().count());
            let mut stderr = io::stderr();
            // A terminal that is gone is no reason to stop.
            let _ = stderr.write_all(line.as_bytes()).and_then(|()| stderr.flush());
            self.0 = text;
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.show(String::new());
    }
}

/// A model's name on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HubModel {
    asked: String,
    id: String,
    revision: String,
}

impl HubModel {
    fn parse(model: &Path) -> Option<Self> {
        let asked = model.to_str()?;
        let (id, revision) = asked.split_once('@').unwrap_or((asked, "main"));
        let (owner, name) = id.split_once('/')?;
        let legal = is_plain(owner) && is_plain(name) && revision.split('/').all(is_plain);
        legal.then(|| Self { asked: asked.into(), id: id.into(), revision: revision.into() })
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.id.clone(), RepoType::Model, revision.into())
    }

    fn refused(&self, reason: String) -> DownloadError {
        DownloadError::Refused { model: self.asked.clone(), reason }
    }
}

/// Whether it is a name, and no way into another folder.
fn is_plain(name: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.bytes().all(legal)
}

/// A model on the hub, and the cache in which it is kept.
struct Hub {
    model: HubModel,
    api: Api,
    cache: Cache,
    endpoint: String,
    token: Option<String>,
    token_file: PathBuf,
    /// Time before a file is taken up again; twice as long each time.
    pause: Duration,
}

impl Hub {
    /// The hub that the environment's variables describe.
    fn new(model: HubModel, variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, DownloadError> {
        let variable = |name| variable(name).filter(|value| !value.is_empty());
        let path = |name| variable(name).map(PathBuf::from);
        let text = |name| variable(name).map(|value| value.to_string_lossy().trim().to_string());
        let caches = || path("XDG_CACHE_HOME").or_else(|| Some(dirs::home_dir()?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(caches()?.join("huggingface")));
        let home = home.ok_or_else(|| model.refused("no home folder to keep it in: set HF_HOME".into()))?;
        let cache = Cache::new(path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let written = || Some(fs::read_to_string(&token_file).ok()?.trim().to_string());
        let token = text("HF_TOKEN").or_else(written).filter(|token| !token.is_empty());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let endpoint = endpoint.trim_end_matches('/').to_string();
        let api = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_token(token.clone());
        let api = api.with_endpoint(endpoint.clone()).build().map_err(|error| model.refused(error.to_string()))?;
        Ok(Self { model, api, cache, endpoint, token, token_file, pause: Duration::from_secs(1) })
    }

    /// Where the model's files are looked for.
    fn folder(&self) -> PathBuf {
        let (revision, repo) = (&self.model.revision, self.model.at(&self.model.revision));
        let named = self.cache.path().join(repo.folder_name()).join("refs").join(revision);
        let commit = fs::read_to_string(named).unwrap_or_default();
        let commit = Some(commit.trim()).filter(|commit| is_plain(commit)).unwrap_or(revision);
        self.cache.repo(repo).pointer_path(commit)
    }

    fn fetch(&self, progress: FileProgress<'_>) -> Result<PathBuf, DownloadError> {
        let folder = self.folder();
        if is_complete(&folder) {
            return Ok(folder);
        }
        let RepoInfo { siblings, sha: commit } = self.info()?;
        let listed = |file: &&str| siblings.iter().any(|sibling| sibling.rfilename == *file);
        let weights = if !listed(&SINGLE) && listed(&INDEX) { INDEX } else { SINGLE };
        if let Some(file) = REQUIRED.iter().chain([&weights]).find(|file| !listed(file)) {
            return Err(self.model.refused(format!("{} has this model, but without {file}", self.endpoint)));
        }
        for file in REQUIRED.into_iter().chain(OPTIONAL.into_iter().filter(listed)).chain([weights]) {
            self.file(&commit, file, progress)?;
        }
        let cached = self.cache.repo(self.model.at(&self.model.revision));
        let folder = cached.pointer_path(&commit);
        if weights == INDEX {
            for shard in shards(&folder.join(INDEX))? {
                self.file(&commit, &shard, progress)?;
            }
        }
        cached.create_ref(&commit).map_err(|error| self.explain(None, error.into()))?;
        Ok(folder)
    }

    /// The commit that the revision is now, and its files.
    fn info(&self) -> Result<RepoInfo, DownloadError> {
        let request = self.api.repo(self.model.at(&self.model.revision)).info_request();
        let answer = request.config().timeout_global(Some(PATIENCE)).build().call();
        let text = answer.and_then(|mut answer| answer.body_mut().read_to_string());
        let text = text.map_err(|error| self.explain(None, ApiError::RequestError(error.into())))?;
        let info = serde_json::from_str(&text).ok().filter(|info: &RepoInfo| is_plain(&info.sha));
        let reason = || format!("what answers at {} is no hub, or wants a login first", self.endpoint);
        info.ok_or_else(|| self.model.refused(reason()))
    }

    /// Fetches a file of a commit unless it is there.
    fn file(&self, commit: &str, file: &str, progress: FileProgress<'_>) -> Result<(), DownloadError> {
        let mut tries = 0;
        loop {
            match self.attempt(commit, file, progress) {
                Err(error) if tries < RETRIES && is_passing(&error) => std::thread::sleep(self.pause * (1 << tries)),
                done => return done.map_err(|error| self.explain(Some(file), error)),
            }
            tries += 1;
        }
    }

    /// Fetches what is missing of a file. The crate does so, but trusts names and lengths, and asks for the rest even of
    /// a file that is all there.
    fn attempt(&self, commit: &str, file: &str, progress: FileProgress<'_>) -> Result<(), ApiError> {
        let (repo, cached) = (self.api.repo(self.model.at(commit)), self.cache.repo(self.model.at(commit)));
        let pointer = cached.pointer_path(commit).join(file);
        if pointer.exists() {
            return Ok(());
        }
        let metadata = self.api.metadata(&repo.url(file))?;
        if metadata.commit_hash() != commit {
            return Err(ApiError::InvalidHeader("x-repo-commit"));
        }
        if !is_plain(metadata.etag().trim_start_matches("W/")) {
            return Err(ApiError::InvalidHeader("etag"));
        }
        let size = metadata.size() as u64;
        let blob = cached.blob_path(metadata.etag());
        let part = blob.with_extension("part");
        match length(&part) {
            Some(bytes) if bytes == size => fs::rename(&part, &blob)?,
            Some(bytes) if bytes > size => fs::remove_file(&part)?,
            _ => {}
        }
        if length(&blob) == Some(size) {
            fs::create_dir_all(cached.pointer_path(commit))?;
            return Ok(fs::hard_link(&blob, &pointer)?);
        }
        let told = Told { file, done: 0, total: size, progress };
        let bytes = length(&repo.download_with_progress(file, told)?).unwrap_or(0);
        if bytes == size {
            return Ok(());
        }
        fs::remove_file(&pointer)?;
        fs::remove_file(&blob)?;
        Err(io::Error::new(ErrorKind::UnexpectedEof, format!("{bytes} bytes came, and not {size}")).into())
    }

    /// What an error means to whoever asked for the model, or for `file` after the hub has shown the model.
    fn explain(&self, file: Option<&str>, error: ApiError) -> DownloadError {
        let (endpoint, id, folder) = (&self.endpoint, &self.model.id, self.folder());
        let mend = format!("set HF_TOKEN or write a token to {}", self.token_file.display());
        let cause = match &error {
            ApiError::RequestError(error) => match &**error {
                ureq::Error::Io(error) => error.to_string(),
                error => error.to_string(),
            },
            ApiError::IoError(error) => error.to_string(),
            ApiError::LockAcquisition(lock) => format!("another program has locked {}", lock.display()),
            error => error.to_string(),
        };
        self.model.refused(match (status(&error), file) {
            (Some(401), None) if self.token.is_none() => {
                format!("no such folder, and {endpoint} shows no such model without a token: if it is private, {mend}")
            }
            (Some(401), None) => format!("{endpoint} does not know the token: {mend} that is valid"),
            (Some(401 | 403), _) => format!("not for everyone: ask for access at {endpoint}/{id}, then {mend}"),
            (Some(404), None) => format!("no such folder, and {endpoint} has no such model"),
            (None, None) if matches!(error, ApiError::RequestError(_)) => {
                let (endpoint, model) = (endpoint.clone(), self.model.asked.clone());
                return DownloadError::Unreachable { endpoint, model, cause, folder };
            }
            (_, Some(file)) if is_passing(&error) => {
                format!("fetching {file} broke off: {cause}; the same command goes on from there")
            }
            (_, file) => {
                format!("cannot fetch {} from {endpoint} to {}: {cause}", file.unwrap_or("it"), folder.display())
            }
        })
    }
}

fn status(error: &ApiError) -> Option<u16> {
    let ApiError::RequestError(error) = error else { return None };
    if let ureq::Error::StatusCode(status) = **error { Some(status) } else { None }
}

/// Whether the same may succeed in a while: the network failed or the hub is busy, not the file system.
fn is_passing(error: &ApiError) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionReset, InvalidData, Other, TimedOut, UnexpectedEof};
    match error {
        ApiError::RequestError(_) => status(error).is_none_or(|status| matches!(status, 408 | 429 | 500..)),
        ApiError::IoError(error) => {
            let kind = error.kind();
            matches!(kind, ConnectionAborted | ConnectionReset | InvalidData | Other | TimedOut | UnexpectedEof)
        }
        _ => false,
    }
}

fn length(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.len())
}

/// Whether a folder has all that a model needs.
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

/// Passes on how much of a file came.
struct Told<'a> {
    file: &'a str,
    done: u64,
    total: u64,
    progress: FileProgress<'a>,
}

impl Progress for Told<'_> {
    fn init(&mut self, _: usize, _: &str) {
        self.done = 0;
    }

    fn update(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(self.file, self.done, self.total);
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests;
