//! Tests against a local hub of a few files.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const STALL_IN_TESTS: Duration = Duration::from_millis(250);
const ID: &str = "owner/model-0.1B";

/// A local hub's behaviour, and the requests it received.
#[derive(Default)]
struct Scene {
    files: BTreeMap<&'static str, Vec<u8>>,
    /// Bytes of a body after which the connection is cut, and how often.
    cut: (usize, usize),
    /// Sends no lengths, so that a cut body looks complete.
    silent: bool,
    /// The status of every path that contains a word.
    status: Option<(&'static str, u16)>,
    etag: Option<&'static str>,
    commit: Option<&'static str>,
    token: Option<String>,
    /// Tokens sent to the redirect target of weights.
    leaked: Vec<String>,
    /// How often a body of weights stalls after its first half.
    stalls: usize,
    /// Ignores ranges and sends whole files.
    whole: bool,
    asked: Vec<String>,
}

impl Scene {
    fn answer(&mut self, path: &str, range: Option<&str>, address: &str) -> (String, Vec<u8>) {
        self.asked.push(format!("{} {}", path.rsplit('/').next().unwrap(), range.unwrap_or("whole")));
        if let Some((_, status)) = self.status.filter(|(word, _)| path.contains(word)) {
            return (format!("HTTP/1.1 {status} No\r\nContent-Length: 0\r\n"), Vec::new());
        }
        if path.starts_with("/api/models/") || path.starts_with("/api/datasets/") {
            let names = self.files.keys().map(|name| format!(r#"{{"rfilename": "{name}"}}"#)).collect::<Vec<_>>();
            let commit = self.commit.unwrap_or(COMMIT);
            let body = format!(r#"{{"sha": "{commit}", "siblings": [{}]}}"#, names.join(", ")).into_bytes();
            return (format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n", body.len()), body);
        }
        let name = path.rsplit('/').next().unwrap();
        let at = |file: &&str| file.rsplit('/').next() == Some(name);
        let Some(body) = self.files.iter().find(|(file, _)| at(file)).map(|(_, body)| body) else {
            return ("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n".into(), Vec::new());
        };
        let etag = self.etag.map_or_else(|| format!("etag-of-{name}"), String::from);
        // Like the real one: weights are on another host, other files at another path.
        let port = address.rsplit(':').next().unwrap();
        let moved = format!("X-Repo-Commit: {COMMIT}\r\nContent-Length: 0\r\n");
        if path.contains("/resolve/") && name.ends_with(".safetensors") {
            let head = format!("HTTP/1.1 302 Found\r\nLocation: http://localhost:{port}/elsewhere/{name}\r\n");
            return (format!("{head}X-Linked-Etag: \"{etag}\"\r\n{moved}"), Vec::new());
        }
        if path.contains("/resolve/") {
            return (format!("HTTP/1.1 307 Moved\r\nLocation: /resolve-cache/{name}\r\n{moved}"), Vec::new());
        }
        let range = range.unwrap().strip_prefix("bytes=").unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let start: usize = start.parse().unwrap();
        let end = end.parse().map_or(body.len(), |end: usize| end + 1);
        if start >= body.len() {
            return ("HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n".into(), Vec::new());
        }
        let mut sent = body[start..end].to_vec();
        let length = match self.silent && sent.len() > 1 {
            true => String::new(),
            false => format!("Content-Length: {}\r\n", sent.len()),
        };
        if self.whole {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nETag: \"{etag}\"\r\n", body.len());
            return (format!("{head}X-Repo-Commit: {COMMIT}\r\n"), body.clone());
        }
        let (most, times) = self.cut;
        if sent.len() > most && times > 0 {
            sent.truncate(most);
            self.cut.1 -= 1;
        }
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\n{length}Content-Range: bytes {start}-{}/{}\r\nETag: \"{etag}\"\r\n\
             X-Repo-Commit: {COMMIT}\r\n",
            end - 1,
            body.len()
        );
        (head, sent)
    }

    fn serve(&mut self, stream: TcpStream, address: &str) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let Some(first) = lines.next() else { return Ok(()) };
        let first = first?;
        let path = first.split(' ').nth(1).unwrap();
        let mut range = None;
        for line in lines {
            let line = line?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(": ").unwrap();
            match name.to_lowercase().as_str() {
                "range" => range = Some(value.to_string()),
                "authorization" if path.contains("/elsewhere/") => self.leaked.push(value.to_string()),
                "authorization" => self.token = Some(value.to_string()),
                _ => {}
            }
        }
        let (head, body) = self.answer(path, range.as_deref(), address);
        let mut stream = stream;
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
        if self.stalls > 0 && body.len() > 10_000 {
            self.stalls -= 1;
            stream.write_all(&body[..body.len() / 2])?;
            std::thread::sleep(STALL_IN_TESTS * 4);
            return Ok(());
        }
        stream.write_all(&body)
    }
}

struct Served {
    endpoint: String,
    scene: Arc<Mutex<Scene>>,
    home: TempDir,
}

impl Served {
    fn new(scene: Scene) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = Self {
            endpoint: format!("http://{address}"),
            scene: Arc::new(Mutex::new(scene)),
            home: TempDir::new().unwrap(),
        };
        let scene = Arc::clone(&served.scene);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // The client may be gone.
                let _ = scene.lock().unwrap().serve(stream, &address);
            }
        });
        served
    }

    fn change(&self, change: impl FnOnce(&mut Scene)) {
        change(&mut self.scene.lock().unwrap());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.scene.lock().unwrap().asked)
    }

    fn hub(&self, model: &str, more: &[(&str, &str)]) -> Hub {
        let model = HubModel::parse(Path::new(model)).unwrap();
        let variable = |name: &str| {
            let given = more.iter().find(|(given, _)| *given == name).map(|(_, value)| OsString::from(value));
            given.or_else(|| match name {
                "HF_HOME" => Some(self.home.path().into()),
                "HF_ENDPOINT" => Some(self.endpoint.clone().into()),
                _ => None,
            })
        };
        let hub = Hub::new(model, variable).unwrap();
        let client = Client::new(&hub.endpoint, hub.token.clone(), STALL_IN_TESTS).unwrap();
        Hub { pause: Duration::ZERO, client, ..hub }
    }

    fn fetch(&self) -> Result<PathBuf, DownloadError> {
        self.hub(ID, &[]).fetch(&mut |_, _, _| {})
    }

    fn refusal(&self) -> String {
        let message = self.fetch().unwrap_err().to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    }

    fn repo(&self) -> PathBuf {
        self.home.path().join("hub/models--owner--model-0.1B")
    }

    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }

    fn blob(&self, name: &str) -> PathBuf {
        self.repo().join("blobs").join(name)
    }
}

fn weights() -> Vec<u8> {
    (0..100_000u32).map(|at| (at % 251) as u8).collect()
}

fn small_model() -> Scene {
    let files = [
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"tokens\": []}".to_vec()),
        ("chat_template.jinja", b"{{ messages }}".to_vec()),
        ("additional_chat_templates/tool_use.jinja", b"{{ tools }}".to_vec()),
        ("special_tokens_map.json", b"{\"bos_token\": \"<s>\"}".to_vec()),
        ("README.md", b"# Model".to_vec()),
        (SINGLE, weights()),
    ];
    Scene { files: files.into(), ..Scene::default() }
}

fn sharded_model(index: &str) -> Scene {
    let mut scene = small_model();
    let weights = scene.files.remove(SINGLE).unwrap();
    scene.files.insert(INDEX, index.as_bytes().to_vec());
    scene.files.insert("model-00001-of-00002.safetensors", weights[..60_000].to_vec());
    scene.files.insert("model-00002-of-00002.safetensors", weights[60_000..].to_vec());
    scene
}

/// An address without a listener.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn a_datasets_training_files_are_fetched_once_into_its_folder() {
    let files = [
        ("README.md", b"# Stories".to_vec()),
        ("data/train-00000-of-00002.jsonl.gz", b"one".to_vec()),
        ("data/train-00001-of-00002.jsonl.gz", b"two".to_vec()),
        ("data/validation-00000-of-00001.jsonl.gz", b"three".to_vec()),
        ("notes/train.txt", b"four".to_vec()),
    ];
    let served = Served::new(Scene { files: files.into(), ..Scene::default() });
    let hub = || {
        let hub = served.hub("owner/stories", &[]);
        Hub { model: HubModel { kind: Kind::Dataset, ..hub.model.clone() }, ..hub }
    };
    let folder = hub().fetch_dataset(&mut |_, _, _| {}).unwrap();
    assert_eq!(folder, served.home.path().join("hub/datasets--owner--stories/snapshots").join(COMMIT));
    for (name, body) in [("train-00000-of-00002", "one"), ("train-00001-of-00002", "two")] {
        assert_eq!(fs::read_to_string(folder.join(format!("data/{name}.jsonl.gz"))).unwrap(), body);
    }
    assert_eq!(fs::read_dir(folder.join("data")).unwrap().count(), 2);
    assert!(!folder.join("notes").exists() && !folder.join("README.md").exists());
    served.asked();
    assert_eq!(hub().fetch_dataset(&mut |_, _, _| {}).unwrap(), folder);
    assert!(served.asked().is_empty(), "a cached model needs no network");
    served.change(|scene| scene.status = Some(("/api/", 404)));
    let hub = served.hub("owner/others", &[]);
    let hub = Hub { model: HubModel { kind: Kind::Dataset, ..hub.model.clone() }, ..hub };
    let message = hub.fetch_dataset(&mut |_, _, _| {}).unwrap_err().to_string();
    assert!(message.contains("no such folder") && message.contains("no such dataset or revision"), "{message}");
}

#[test]
fn of_a_datasets_files_one_format_is_chosen_and_the_held_out_parts_are_not() {
    let chosen = |files: &[&str]| -> Vec<String> {
        let files: BTreeSet<String> = files.iter().map(|file| file.to_string()).collect();
        text_files(&files).into_iter().map(String::from).collect()
    };
    assert_eq!(chosen(&["a.txt", "b.parquet", "c.csv"]), ["b.parquet"]);
    assert_eq!(chosen(&["test.jsonl", "corpus.jsonl", "dev.jsonl"]), ["corpus.jsonl"]);
    assert_eq!(chosen(&["en/train.parquet", "en/valid.parquet", "x.parquet"]), ["en/train.parquet"]);
    assert!(chosen(&["../train.txt", ".hidden.txt", "a.csv"]).is_empty());
}

#[test]
fn what_exists_or_is_no_name_of_the_hub_is_returned_as_it_is() {
    let folder = TempDir::new().unwrap();
    for model in [folder.path(), Path::new("no/such/folder"), Path::new("./no/such"), Path::new("nothing")] {
        assert_eq!(model_folder(model, &mut |_, _, _| {}).unwrap(), model);
    }
}

#[test]
fn only_an_owner_and_a_name_are_a_name_of_the_hub() {
    let parse = |text: &str| HubModel::parse(Path::new(text)).map(|model| (model.id, model.revision));
    let is = |id: &str, revision: &str| Some((id.to_string(), revision.to_string()));
    assert_eq!(parse("Qwen/Qwen3-0.6B"), is("Qwen/Qwen3-0.6B", "main"));
    assert_eq!(parse("Qwen/Qwen3-0.6B@v1.0"), is("Qwen/Qwen3-0.6B", "v1.0"));
    assert_eq!(parse("Qwen/Qwen3-0.6B@refs/pr/5"), is("Qwen/Qwen3-0.6B", "refs/pr/5"));
    let others = [
        "",
        "/",
        "gpt2",
        "a/",
        "/a",
        "a/b/",
        "a/b/c",
        "./a",
        "../a",
        "a/..",
        "a/.b",
        "~/a",
        "a/b c",
        "a/b@",
        "@a/b",
        "a/b@..",
        "a/b@c/../d",
        "a/b@/c",
        "a/b@c@d",
        "a\\b/c",
        "a/b?c",
        "a/b#c",
        "a/b%2Fc",
        "a/b\n",
    ];
    for other in others {
        assert_eq!(parse(other), None, "{other:?}");
    }
}

#[test]
fn a_model_is_fetched_once_and_then_found_without_a_network() {
    let served = Served::new(small_model());
    let folder = served.fetch().unwrap();
    assert_eq!(folder, served.snapshot());
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), b"{}");
    assert_eq!(fs::read(folder.join("chat_template.jinja")).unwrap(), b"{{ messages }}");
    assert_eq!(fs::read(folder.join("additional_chat_templates/tool_use.jinja")).unwrap(), b"{{ tools }}");
    assert_eq!(fs::read(folder.join("special_tokens_map.json")).unwrap(), b"{\"bos_token\": \"<s>\"}");
    assert_eq!(fs::read(folder.join(SINGLE)).unwrap(), weights());
    assert!(!folder.join("README.md").exists() && !folder.join("generation_config.json").exists());
    assert_eq!(fs::read_to_string(served.repo().join("refs/main")).unwrap(), COMMIT);
    served.asked();
    assert_eq!(served.fetch().unwrap(), folder);
    assert_eq!(served.asked(), Vec::<String>::new());
    let offline = nowhere();
    for model in [ID.to_string(), format!("{ID}@{COMMIT}")] {
        let hub = served.hub(&model, &[("HF_ENDPOINT", &offline)]);
        assert_eq!(hub.fetch(&mut |_, _, _| {}).unwrap(), folder);
    }
}

#[test]
fn only_what_is_missing_is_fetched() {
    let served = Served::new(small_model());
    let folder = served.fetch().unwrap();
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    fs::remove_file(served.blob("etag-of-tokenizer.json")).unwrap();
    served.asked();
    served.fetch().unwrap();
    let asked = served.asked();
    assert!(folder.join("tokenizer.json").exists());
    assert!(asked.iter().all(|asked| asked.starts_with("main ") || asked.starts_with("tokenizer.json ")), "{asked:?}");
}

#[test]
fn bytes_that_another_revision_has_are_not_fetched_again() {
    let served = Served::new(small_model());
    let folder = served.fetch().unwrap();
    fs::remove_file(folder.join(SINGLE)).unwrap();
    served.asked();
    assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
    assert!(!served.asked().contains(&format!("{SINGLE} bytes=0-")));
}

#[test]
fn all_files_that_an_index_names_are_fetched() {
    let index = r#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"}}"#;
    let served = Served::new(sharded_model(index));
    let folder = served.fetch().unwrap();
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(shards.map(|shard| fs::read(folder.join(shard)).unwrap()).concat(), weights());
    served.asked();
    served.fetch().unwrap();
    assert_eq!(served.asked(), Vec::<String>::new());
    fs::remove_file(folder.join(shards[1])).unwrap();
    fs::remove_file(served.blob("etag-of-model-00002-of-00002.safetensors")).unwrap();
    served.fetch().unwrap();
    assert!(folder.join(shards[1]).exists());
}

#[test]
fn an_index_leads_to_no_file_outside_of_the_folder() {
    for name in ["../config.json", "/etc/passwd", "a/b", "..", "", "a\\\\b", ".hidden", "a?b"] {
        let served = Served::new(sharded_model(&format!(r#"{{"weight_map": {{"a": "{name}"}}}}"#)));
        let message = served.refusal();
        let index = served.snapshot().join(INDEX);
        assert_eq!(message, format!("{}: \"{name}\" is not a file's name", index.display()));
        let asked = served.asked();
        assert!(asked.last().unwrap().starts_with(INDEX), "{asked:?}");
    }
    for (index, reason) in [("{}", "weight_map is missing"), ("<html>", "not valid JSON")] {
        let message = Served::new(sharded_model(index)).refusal();
        assert!(message.contains(reason), "{message}");
    }
}

#[test]
fn a_download_that_breaks_off_goes_on_where_it_stopped() {
    let served = Served::new(Scene { cut: (30_000, 2), ..small_model() });
    let folder = served.fetch().unwrap();
    assert_eq!(fs::read(folder.join(SINGLE)).unwrap(), weights());
    let asked = served.asked();
    let wanted = ["bytes=0-", "bytes=30000-", "bytes=60000-"].map(|range| format!("{SINGLE} {range}"));
    assert!(wanted.iter().all(|wanted| asked.contains(wanted)), "{asked:?}");
}

#[test]
fn a_later_run_goes_on_where_an_earlier_one_gave_up() {
    let served = Served::new(Scene { cut: (10_000, usize::MAX), ..small_model() });
    let message = served.refusal();
    assert!(message.starts_with("owner/model-0.1B: fetching model.safetensors failed: "), "{message}");
    assert!(message.ends_with("; run the same command again to continue"), "{message}");
    assert!(!served.snapshot().join(SINGLE).exists());
    assert_eq!(length(&served.blob("etag-of-model.safetensors")), None);
    assert_eq!(length(&served.blob("etag-of-model.safetensors.part")), Some(60_000));
    served.change(|scene| scene.cut = (0, 0));
    served.asked();
    assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
    let asked = served.asked();
    assert!(asked.contains(&format!("{SINGLE} bytes=60000-")), "{asked:?}");
    assert!(asked.iter().all(|asked| !asked.starts_with("config.json")), "{asked:?}");
}

#[test]
fn a_run_that_ended_just_before_the_last_step_or_left_too_much_does_no_harm() {
    let mut long = weights();
    long.extend(b"more");
    for left in [weights(), long] {
        let served = Served::new(small_model());
        let part = served.blob("etag-of-model.safetensors.part");
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(&part, left).unwrap();
        assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
        assert!(!part.exists());
    }
}

#[test]
fn a_file_that_ends_early_without_a_word_does_not_stay() {
    let served = Served::new(Scene { cut: (10_000, usize::MAX), silent: true, ..small_model() });
    let message = served.refusal();
    assert!(message.contains("failed: received 60000 bytes instead of 100000"), "{message}");
    assert!(!served.snapshot().join(SINGLE).exists());
    assert!(!served.blob("etag-of-model.safetensors").exists());
    served.change(|scene| scene.cut = (0, 0));
    assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
}

#[test]
fn a_transfer_that_stalls_is_taken_up_again() {
    let served = Served::new(Scene { stalls: 1, ..small_model() });
    assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
    let asked = served.asked();
    assert!(asked.contains(&format!("{SINGLE} bytes=50000-")), "{asked:?}");
}

#[test]
fn the_token_goes_to_the_hub_and_not_to_where_it_redirects() {
    let served = Served::new(small_model());
    served.hub(ID, &[("HF_TOKEN", "hf_secret")]).fetch(&mut |_, _, _| {}).unwrap();
    let scene = served.scene.lock().unwrap();
    assert_eq!(scene.token.as_deref(), Some("Bearer hf_secret"));
    assert_eq!(scene.leaked, Vec::<String>::new());
}

#[test]
fn a_redirect_that_leads_nowhere_is_refused() {
    let served = Served::new(small_model());
    for status in [301, 302, 303, 307, 308] {
        served.change(|scene| scene.status = Some(("elsewhere", status)));
        let message = served.refusal();
        assert!(message.contains("cannot fetch model.safetensors from "), "{message}");
        assert!(message.ends_with("header location is missing or invalid"), "{message}");
    }
}

#[test]
fn a_redirect_is_followed_to_hosts_no_less_safe_than_the_hub() {
    let to = |hub: &str, location: &str| {
        let client = Client::new(hub, None, STALL).unwrap();
        client.redirected(&format!("{hub}/a/b").parse().unwrap(), location)
    };
    assert_eq!(to("https://hub", "/c?d=e").as_deref(), Some("https://hub/c?d=e"));
    assert_eq!(to("https://hub", "//cdn/c").as_deref(), Some("https://cdn/c"));
    assert_eq!(to("https://hub", "https://cdn/c").as_deref(), Some("https://cdn/c"));
    assert_eq!(to("http://hub", "http://cdn/c").as_deref(), Some("http://cdn/c"));
    for location in ["http://cdn/c", "file:///etc/passwd", "c", "", "ftp://cdn/c"] {
        assert_eq!(to("https://hub", location), None, "{location}");
    }
}

#[test]
fn a_large_file_is_checked_by_the_hash_that_is_its_name() {
    let hash = |bytes: &[u8]| {
        let hex: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        &*hex.leak()
    };
    let right = Served::new(Scene { etag: Some(hash(&weights())), cut: (30_000, 2), ..small_model() });
    right.hub(ID, &[]).file(COMMIT, SINGLE, &mut |_, _, _| {}).unwrap();
    assert_eq!(fs::read(right.snapshot().join(SINGLE)).unwrap(), weights());
    let wrong = Served::new(Scene { etag: Some(hash(b"other")), ..small_model() });
    let message = wrong.hub(ID, &[]).file(COMMIT, SINGLE, &mut |_, _, _| {}).unwrap_err().to_string();
    let expected = format!("its sha256 is {} instead of the hub's {}", hash(&weights()), hash(b"other"));
    assert!(message.contains(&expected), "{message}");
    assert!(!wrong.snapshot().join(SINGLE).exists());
    assert_eq!(length(&wrong.blob(hash(b"other"))), None);
    assert_eq!(length(&wrong.blob(&format!("{}.part", hash(b"other")))), None);
}

#[test]
fn a_host_that_sends_all_of_a_file_again_does_no_harm() {
    let served = Served::new(Scene { whole: true, ..small_model() });
    let part = served.blob("etag-of-model.safetensors.part");
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    fs::write(&part, &weights()[..40_000]).unwrap();
    assert_eq!(fs::read(served.fetch().unwrap().join(SINGLE)).unwrap(), weights());
}

#[test]
fn progress_counts_each_file_up_to_its_last_byte() {
    let served = Served::new(Scene { cut: (30_000, 1), ..small_model() });
    let mut told = Vec::new();
    served.hub(ID, &[]).fetch(&mut |file, done, total| told.push((file.to_string(), done, total))).unwrap();
    let of = |name: &str| told.iter().filter(|(file, ..)| file == name).map(|told| (told.1, told.2)).collect();
    let (config, single): (Vec<_>, Vec<_>) = (of("config.json"), of(SINGLE));
    assert_eq!(config.last(), Some(&(2, 2)));
    assert!(single.is_sorted() && single.contains(&(30_000, 100_000)), "{single:?}");
    assert_eq!(single.last(), Some(&(100_000, 100_000)));
}

#[test]
fn what_a_terminal_shows_names_file_share_and_size() {
    assert_eq!(fetching(SINGLE, 441_000_000, 1_190_000_000), "fetching model.safetensors:  37% of 1.19 GB");
    assert_eq!(fetching("tokenizer.json", 11_400_000, 11_422_654), "fetching tokenizer.json:  99% of 11.42 MB");
}

#[test]
fn without_a_network_one_line_says_where_the_files_belong_and_there_they_are_found() {
    let served = Served { endpoint: nowhere(), ..Served::new(small_model()) };
    let (message, folder) = (served.refusal(), served.repo().join("snapshots/main"));
    let start = format!("cannot reach {} to fetch owner/model-0.1B: Connection refused", served.endpoint);
    assert!(message.starts_with(&start), "{message}");
    assert!(message.ends_with(&format!("; put its files in {} or give a folder", folder.display())), "{message}");
    fs::create_dir_all(&folder).unwrap();
    for file in [REQUIRED[0], REQUIRED[1], SINGLE] {
        assert!(served.fetch().is_err());
        fs::write(folder.join(file), "{}").unwrap();
    }
    assert_eq!(served.fetch().unwrap(), folder);
}

#[test]
fn each_refusal_of_the_hub_says_what_helps() {
    let served = Served::new(small_model());
    let token_file = served.home.path().join("token");
    let mend = format!("set HF_TOKEN or write a token to {}", token_file.display());
    let endpoint = served.endpoint.clone();
    let refusal = |word, status| {
        served.change(|scene| scene.status = Some((word, status)));
        let message = served.refusal();
        message.strip_prefix("owner/model-0.1B: ").unwrap().to_string()
    };
    let unknown = format!("no such folder, and {endpoint} has no public model of this name: if it is private, {mend}");
    assert_eq!(refusal("/api/", 401), unknown);
    assert_eq!(refusal("/api/", 404), format!("no such folder, and {endpoint} has no such model or revision"));
    let gated = format!("access is restricted: ask for it at {endpoint}/{ID}, then {mend}");
    assert_eq!(refusal("/api/", 403), gated);
    assert_eq!(refusal("config.json", 401), gated);
    assert_eq!(refusal("config.json", 403), gated);
    assert_eq!(
        refusal("elsewhere", 503),
        "fetching model.safetensors failed: http status: 503; \
        run the same command again to continue"
    );
    fs::write(&token_file, "hf_wrong\n").unwrap();
    assert_eq!(refusal("/api/", 401), format!("{endpoint} rejects the token: {mend} that is valid"));
}

#[test]
fn a_model_without_tokenizer_or_weights_is_refused_before_anything_is_fetched() {
    for missing in ["config.json", "tokenizer.json", SINGLE] {
        let mut scene = small_model();
        scene.files.remove(missing);
        let served = Served::new(scene);
        let wanted = format!("owner/model-0.1B: {} has this model, but without {missing}", served.endpoint);
        assert_eq!(served.refusal(), wanted);
        assert_eq!(served.asked(), ["main whole"]);
    }
}

#[test]
fn names_from_a_hub_lead_nowhere_outside_of_the_cache() {
    for etag in ["../../../outside", "/tmp/outside", ".."] {
        let served = Served::new(Scene { etag: Some(etag), ..small_model() });
        assert!(served.refusal().ends_with("header etag is missing or invalid"));
    }
    let served = Served::new(Scene { etag: Some("W/weak"), ..small_model() });
    served.hub(ID, &[]).file(COMMIT, "config.json", &mut |_, _, _| {}).unwrap();
    let served = Served::new(Scene { commit: Some("../../outside"), ..small_model() });
    assert!(served.refusal().contains("is not a hub, or needs a login"));
    let served = Served::new(Scene { commit: Some("89abcdef"), ..small_model() });
    assert!(served.refusal().ends_with("header x-repo-commit is missing or invalid"));
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let served = Served::new(small_model());
    fs::write(served.home.path().join("hub"), "a file").unwrap();
    let message = served.refusal();
    assert!(message.contains("cannot fetch config.json from ") && message.contains("Not a directory"), "{message}");
}

#[test]
fn the_environment_says_where_the_hub_the_cache_and_the_token_are() {
    let served = Served::new(small_model());
    let (elsewhere, token_file) = (served.home.path().join("elsewhere"), served.home.path().join("my-token"));
    fs::write(served.home.path().join("token"), "hf_home\n").unwrap();
    fs::write(&token_file, "hf_file\n").unwrap();
    let sent = |more: &[(&str, &str)]| {
        served.hub(ID, more).listing().unwrap();
        served.scene.lock().unwrap().token.take()
    };
    assert_eq!(sent(&[]).as_deref(), Some("Bearer hf_home"));
    assert_eq!(sent(&[("HF_TOKEN_PATH", token_file.to_str().unwrap())]).as_deref(), Some("Bearer hf_file"));
    assert_eq!(sent(&[("HF_TOKEN", "hf_given\n")]).as_deref(), Some("Bearer hf_given"));
    assert_eq!(served.hub(ID, &[]).folder(), served.repo().join("snapshots/main"));
    let hub = served.hub(ID, &[("HF_HUB_CACHE", elsewhere.to_str().unwrap())]);
    assert_eq!(hub.folder(), elsewhere.join("models--owner--model-0.1B/snapshots/main"));
    let hub = served.hub(ID, &[("HF_HOME", ""), ("XDG_CACHE_HOME", elsewhere.to_str().unwrap())]);
    assert_eq!(hub.folder(), elsewhere.join("huggingface/hub/models--owner--model-0.1B/snapshots/main"));
    let hub = served.hub(ID, &[("HF_ENDPOINT", "")]);
    assert_eq!(hub.endpoint, "https://huggingface.co");
}

#[test]
fn a_gguf_file_of_a_quantization_is_fetched_once_with_all_its_parts() {
    let files = [
        ("README.md", b"# Model".to_vec()),
        ("model-Q4_K_M.gguf", b"four".to_vec()),
        ("mmproj-model-Q8_0.gguf", b"eyes".to_vec()),
        ("Q8_0/model-Q8_0-00001-of-00002.gguf", b"eight".to_vec()),
        ("Q8_0/model-Q8_0-00002-of-00002.gguf", b"more".to_vec()),
    ];
    let served = Served::new(Scene { files: files.into(), ..Scene::default() });
    let fetch = |model: &str| served.hub(model, &[]).fetch(&mut |_, _, _| {});
    let four = fetch("owner/model-0.1B:q4_k_m").unwrap();
    assert_eq!(four, served.snapshot().join("model-Q4_K_M.gguf"));
    assert_eq!(fs::read_to_string(&four).unwrap(), "four");
    assert_eq!(fs::read_dir(served.snapshot()).unwrap().count(), 1, "nothing else was fetched");
    let eight = fetch("owner/model-0.1B@main:Q8_0").unwrap();
    assert_eq!(eight, served.snapshot().join("Q8_0/model-Q8_0-00001-of-00002.gguf"));
    for (part, body) in [("1", "eight"), ("2", "more")] {
        let path = served.snapshot().join(format!("Q8_0/model-Q8_0-0000{part}-of-00002.gguf"));
        assert_eq!(fs::read_to_string(path).unwrap(), body);
    }
    served.asked();
    assert_eq!((fetch("owner/model-0.1B:Q4_K_M").unwrap(), fetch("owner/model-0.1B:q8_0").unwrap()), (four, eight));
    assert!(served.asked().is_empty(), "a cached model needs no network");

    let refusal = |model: &str| fetch(model).unwrap_err().to_string();
    let message = refusal("owner/model-0.1B:Q2_K");
    assert!(message.contains("no GGUF file is Q2_K") && message.contains("model-Q4_K_M.gguf"), "{message}");
    let message = refusal("owner/model-0.1B:model");
    assert!(message.contains("several GGUF files are model"), "{message}");
    let message = refusal(ID);
    assert!(message.contains("without config.json; owner/model-0.1B:QUANTIZATION"), "{message}");
    assert!(message.contains("Q8_0/model-Q8_0-00001-of-00002.gguf") && !message.contains("mmproj"), "{message}");
    assert_eq!(HubModel::parse(Path::new("models/kiln.gguf")), None, "a file that is not there");
    assert_eq!(HubModel::parse(Path::new("owner/model:../x")), None);
}
