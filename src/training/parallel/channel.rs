//! TCP channels between rank 0 and each other rank. One carries commands, heartbeats and failures;
//! the other carries tensors through host memory.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fireclay_kernels::{Collective, HostExchange, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::environment::Place;
use super::messages::{Command, FromFirst, ToFirst};
use crate::failure::Failure;

/// Heartbeat interval, and the timeout after which a silent rank counts as dead.
const BEAT: Duration = Duration::from_millis(500);
const SILENCE: Duration = Duration::from_secs(6);
/// How long ranks wait for each other at startup. Machines do not start at the same time.
const ARRIVAL: Duration = Duration::from_secs(600);
/// How long a new connection may take to send its greeting.
const GREETING: Duration = Duration::from_secs(10);
/// How long a failed send or receive waits before it ends the process: the control channel usually
/// reports the cause first.
const ELSEWHERE: Duration = Duration::from_secs(12);
/// First word of a greeting.
const MAGIC: &str = "fireclay ranks 1";

/// This rank's connection to the other ranks of the run.
#[derive(Clone, Debug)]
pub struct Ranks {
    rank: Rank,
    local: usize,
    link: Link,
}

#[derive(Clone, Debug)]
enum Link {
    Only,
    First(Arc<First>),
    Other(Arc<Other>),
}

/// Rank 0's side.
#[derive(Debug)]
struct First {
    others: Vec<Mutex<TcpStream>>,
    data: Mutex<Vec<TcpStream>>,
    life: Life,
}

/// The side of any other rank.
#[derive(Debug)]
struct Other {
    rank: usize,
    first: Mutex<TcpStream>,
    data: Mutex<TcpStream>,
    commands: Mutex<Receiver<Command>>,
    life: Life,
}

/// How this process ends.
struct Life {
    /// The process is ending, successfully or not. No further failure is reported.
    is_ending: AtomicBool,
    /// Rank 0 has ended the run and notified the other ranks.
    is_over: AtomicBool,
    /// Aborted before the process exits, because devices may be waiting in it.
    collective: Mutex<Option<Collective>>,
    before_exit: fn(),
    /// Whether `--gpus` started this rank: then the launcher reports that rank 0 has died.
    is_watched: bool,
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Life {{ is_ending: {:?} }}", self.is_ending)
    }
}

impl Life {
    /// Claims the right to end this process. If another thread has it, this blocks forever.
    fn take_end(&self) {
        if self.is_ending.swap(true, Ordering::AcqRel) {
            loop {
                thread::park();
            }
        }
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Ends the process without saving. Call [`take_end`](Self::take_end) first.
    fn exit(&self, line: Option<&str>) -> ! {
        (self.before_exit)();
        if let Some(line) = line {
            eprintln!("fireclay: {line}");
        }
        self.abort();
        std::process::exit(1)
    }

    fn abort(&self) {
        // A device that waits for a dead rank would keep the driver from shutting down.
        if let Some(collective) = locked(&self.collective).take() {
            let (sender, receiver) = channel();
            thread::spawn(move || {
                collective.abort();
                // Nobody receives this after the timeout below.
                let _ = sender.send(());
            });
            let _ = receiver.recv_timeout(Duration::from_secs(2));
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ranks {
    /// A run of one rank.
    pub fn only() -> Self {
        Self { rank: Rank::ONLY, local: 0, link: Link::Only }
    }

    /// Connects to the other ranks and watches them from then on. If a rank dies, is silent or
    /// fails, this process prints one line and exits. `before_exit` is called before that. `stop`
    /// is called on rank 0 when another rank asks to stop the run.
    ///
    /// # Errors
    /// If rank 0 cannot listen, the ranks do not find each other, or two claim the same rank.
    pub fn join(place: &Place, before_exit: fn(), stop: impl Fn() + Send + Sync + 'static) -> Result<Self, Failure> {
        let Place { rank, local, is_watched, .. } = *place;
        let life = Life {
            is_ending: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            collective: Mutex::new(None),
            before_exit,
            is_watched,
        };
        let link = match rank.rank {
            _ if rank.ranks == 1 => Link::Only,
            0 => Link::First(First::listen(place, life, stop)?),
            _ => Link::Other(Other::connect(place, life)?),
        };
        Ok(Self { rank, local, link })
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The local rank: the index of this rank on its machine.
    pub fn local(&self) -> usize {
        self.local
    }

    /// Exchanges tensors through host memory.
    pub(crate) fn host(&self) -> Arc<dyn HostExchange> {
        Arc::new(Host(self.clone()))
    }

    /// Polls `collective` for failures, and aborts it when this process ends.
    pub(crate) fn watch(&self, collective: &Collective) {
        let (Some(life), collective) = (self.life(), collective.clone()) else { return };
        *locked(&life.collective) = Some(collective.clone());
        let ranks = self.clone();
        thread::spawn(move || {
            while ranks.life().is_some_and(|life| !life.is_ending()) {
                if let Some(reason) = collective.fault() {
                    // If a rank has died, its channel reports that first.
                    thread::sleep(2 * BEAT);
                    ranks.fail(&reason);
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
    }

    fn life(&self) -> Option<&Life> {
        match &self.link {
            Link::Only => None,
            Link::First(first) => Some(&first.life),
            Link::Other(other) => Some(&other.life),
        }
    }

    /// Sends a command to the other ranks. Does nothing unless this is rank 0 of several.
    pub(crate) fn tell(&self, command: &Command) {
        if let Link::First(first) = &self.link {
            first.send(&FromFirst::Do(command.clone()));
        }
    }

    /// Waits for the next command of rank 0.
    ///
    /// # Errors
    /// If this is rank 0, or the only rank.
    pub(crate) fn next(&self) -> Result<Command, Failure> {
        let Link::Other(other) = &self.link else { return Err(Failure::new("rank 0 receives no commands")) };
        match locked(&other.commands).recv() {
            Ok(command) => Ok(command),
            Err(_) => other.lost("rank 0 closed the channel"),
        }
    }

    /// Asks rank 0 to stop the run.
    pub fn ask_to_stop(&self) {
        if let Link::Other(other) = &self.link {
            // If the channel is closed, the thread that reads it reports that.
            let _ = send(&other.first, &ToFirst::Stop);
        }
    }

    /// Ends the run successfully: rank 0 sends `End`, other ranks send `Done`.
    pub fn end(&self) {
        match &self.link {
            Link::Only => {}
            Link::First(first) if first.life.is_over.load(Ordering::Acquire) => {}
            Link::First(first) => {
                first.life.take_end();
                first.life.is_over.store(true, Ordering::Release);
                first.send(&FromFirst::Do(Command::End));
            }
            Link::Other(other) => {
                other.life.take_end();
                let _ = send(&other.first, &ToFirst::Done);
            }
        }
    }

    /// Reports that the run has failed on this rank. On rank 0 the other ranks are told to abort,
    /// and the caller prints the failure. Any other rank sends the failure to rank 0 and exits.
    pub fn failed(&self, failure: &Failure) {
        match &self.link {
            Link::Only => {}
            Link::First(first) if first.life.is_over.load(Ordering::Acquire) => {}
            Link::First(first) => {
                first.life.take_end();
                first.life.is_over.store(true, Ordering::Release);
                first.send(&FromFirst::Abort);
                first.life.abort();
            }
            Link::Other(_) => self.fail(&failure.to_string()),
        }
    }

    /// Ends all ranks with `reason`.
    fn fail(&self, reason: &str) -> ! {
        match &self.link {
            Link::First(first) => first.fail(reason),
            Link::Other(other) => other.fail(reason),
            Link::Only => std::process::exit(1),
        }
    }
}

impl First {
    /// Accepts the connections of all other ranks.
    fn listen(place: &Place, life: Life, stop: impl Fn() + Send + Sync + 'static) -> Result<Arc<Self>, Failure> {
        let Place { rank: Rank { ranks, .. }, port, host, word, .. } = place;
        let local = ["127.0.0.1", "localhost"].contains(&host.as_str());
        let address = if local { "127.0.0.1" } else { "0.0.0.0" };
        let listener = TcpListener::bind((address, *port)).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        let listener = listener.map_err(|error| {
            Failure::new(format!(
                "rank 0 cannot listen on port {port}: {error}; choose another with FIRECLAY_PORT=PORT"
            ))
        })?;
        let mut control: Vec<Option<TcpStream>> = (1..*ranks).map(|_| None).collect();
        let mut data: Vec<Option<TcpStream>> = (1..*ranks).map(|_| None).collect();
        let begun = Instant::now();
        while control.iter().chain(&data).any(Option::is_none) {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if begun.elapsed() > ARRIVAL {
                        let lacks: Vec<String> = (1..*ranks)
                            .filter(|rank| control[rank - 1].is_none())
                            .map(|rank| rank.to_string())
                            .collect();
                        let (lacks, seconds) = (lacks.join(", "), ARRIVAL.as_secs());
                        return Err(Failure::new(format!(
                            "ranks {lacks} of {ranks} did not connect within {seconds} s"
                        )));
                    }
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
                Err(error) => return Err(Failure::new(format!("rank 0 cannot listen on port {port}: {error}"))),
            };
            // Anything without the greeting of this run is another program.
            let Some((greeted, kind, rank)) = greeting(&stream) else { continue };
            if greeted != greets(word, *ranks) || !(1..*ranks).contains(&rank) {
                continue;
            }
            let place = if kind == "control" { &mut control[rank - 1] } else { &mut data[rank - 1] };
            if place.replace(stream).is_some() {
                return Err(Failure::new(format!(
                    "two processes claim rank {rank}: does another run use port {port}?"
                )));
            }
        }
        let others: Vec<TcpStream> = control.into_iter().flatten().collect();
        let read = others.iter().map(TcpStream::try_clone).collect::<Result<Vec<_>, _>>();
        let read = read.map_err(|error| Failure::new(format!("connection to a rank: {error}")))?;
        let first = Arc::new(Self {
            others: others.into_iter().map(Mutex::new).collect(),
            data: Mutex::new(data.into_iter().flatten().collect()),
            life,
        });
        let stop = Arc::new(stop);
        for (at, stream) in read.into_iter().enumerate() {
            let (first, stop) = (Arc::clone(&first), Arc::clone(&stop));
            thread::spawn(move || first.hear(at + 1, stream, &*stop));
        }
        let beats = Arc::clone(&first);
        thread::spawn(move || {
            while !beats.life.is_ending() {
                beats.send(&FromFirst::Beat);
                thread::sleep(BEAT);
            }
        });
        Ok(first)
    }

    /// Reads a rank's messages until the run ends.
    fn hear(&self, rank: usize, stream: TcpStream, stop: &dyn Fn()) {
        for message in messages(stream) {
            match message {
                Ok(ToFirst::Beat) => {}
                Ok(ToFirst::Stop) => stop(),
                Ok(ToFirst::Failed(reason)) => self.fail(&format!("rank {rank}: {reason}")),
                Ok(ToFirst::Done) => return,
                Err(_) if self.life.is_ending() => return,
                Err(Lost::Silent) => {
                    let seconds = SILENCE.as_secs();
                    self.fail(&format!("rank {rank} sent no heartbeat for {seconds} s; {RESUME}"));
                }
                Err(Lost::Gone) => {
                    self.fail(&format!("rank {rank} exited: it was killed, or ran out of memory; {RESUME}"));
                }
            }
        }
    }

    fn send(&self, message: &FromFirst) {
        for other in &self.others {
            // If the rank has died, the thread that reads its channel reports that.
            let _ = send(other, message);
        }
    }

    fn fail(&self, reason: &str) -> ! {
        self.life.take_end();
        self.send(&FromFirst::Abort);
        self.life.exit(Some(reason))
    }
}

const RESUME: &str = "resume from the last checkpoint: fireclay train --resume";

impl Other {
    fn connect(place: &Place, life: Life) -> Result<Arc<Self>, Failure> {
        let Place { rank: Rank { rank, ranks }, port, host, word, .. } = place;
        let begun = Instant::now();
        let connect = |kind: &str| loop {
            let addresses = (host.as_str(), *port).to_socket_addrs();
            let stream = addresses.and_then(|mut addresses| {
                let address = addresses.next().ok_or_else(|| std::io::Error::other("no address"))?;
                TcpStream::connect_timeout(&address, Duration::from_secs(5))
            });
            let greeted = stream.and_then(|mut stream| {
                stream.set_nodelay(true)?;
                stream.write_all(format!("{}\n{kind}\n{rank}\n", greets(word, *ranks)).as_bytes())?;
                Ok(stream)
            });
            match greeted {
                Ok(stream) => return Ok(stream),
                Err(error) if begun.elapsed() > ARRIVAL => {
                    let seconds = ARRIVAL.as_secs();
                    return Err(Failure::new(format!(
                        "rank 0 was not found at {host}:{port} within {seconds} s: {error}"
                    )));
                }
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        };
        let (first, data) = (connect("control")?, connect("data")?);
        let read = first.try_clone().map_err(|error| Failure::new(format!("connection to rank 0: {error}")))?;
        let (sender, receiver) = channel();
        let other = Arc::new(Self {
            rank: *rank,
            first: Mutex::new(first),
            data: Mutex::new(data),
            commands: Mutex::new(receiver),
            life,
        });
        let hears = Arc::clone(&other);
        thread::spawn(move || hears.hear(read, &sender));
        let beats = Arc::clone(&other);
        thread::spawn(move || {
            while !beats.life.is_ending() && send(&beats.first, &ToFirst::Beat).is_ok() {
                thread::sleep(BEAT);
            }
        });
        if place.is_watched {
            let watched = Arc::clone(&other);
            thread::spawn(move || {
                // Standard input closes when the launcher dies.
                let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
                watched.life.take_end();
                watched.life.exit(None);
            });
        }
        Ok(other)
    }

    /// Reads rank 0's messages until the run ends.
    fn hear(&self, stream: TcpStream, commands: &Sender<Command>) {
        // Rank 0 sends its first heartbeat only after all ranks have connected.
        let (mut may_wait, begun) = (true, Instant::now());
        for message in messages(stream) {
            match message {
                Ok(FromFirst::Beat) => may_wait = false,
                Ok(FromFirst::Do(command)) => {
                    let is_last = matches!(command, Command::End);
                    if commands.send(command).is_err() || is_last {
                        return;
                    }
                }
                Ok(FromFirst::Abort) => {
                    self.life.take_end();
                    self.life.exit(None);
                }
                Err(_) if self.life.is_ending() => return,
                Err(Lost::Silent) if may_wait && begun.elapsed() < ARRIVAL => {}
                Err(Lost::Silent) => {
                    let seconds = SILENCE.as_secs();
                    self.end(&format!("rank 0 sent no heartbeat for {seconds} s"));
                }
                Err(Lost::Gone) => self.end("lost the connection to rank 0"),
            }
        }
    }

    /// Ends this rank when rank 0 cannot report why.
    fn end(&self, reason: &str) -> ! {
        self.life.take_end();
        let line = format!("{reason}; rank {} exits; {RESUME}", self.rank);
        self.life.exit((!self.life.is_watched).then_some(line.as_str()))
    }

    /// Ends this rank after a failure that the reading thread sees, too, and reports with its
    /// cause.
    fn lost(&self, reason: &str) -> ! {
        thread::sleep(ELSEWHERE);
        self.end(reason)
    }

    fn fail(&self, reason: &str) -> ! {
        self.life.take_end();
        let told = send(&self.first, &ToFirst::Failed(reason.to_string()));
        // Rank 0 ends all ranks. If the message could not be sent, this rank prints the reason.
        thread::sleep(if told.is_ok() { Duration::from_secs(2) } else { Duration::ZERO });
        self.life.exit(told.is_err().then_some(reason))
    }
}

/// Why no further message comes.
enum Lost {
    Gone,
    Silent,
}

/// The messages of a channel. The last item is the reason why there are no more.
fn messages<T: DeserializeOwned>(stream: TcpStream) -> impl Iterator<Item = Result<T, Lost>> {
    // On a closed connection this fails, and so does the next read.
    let _ = stream.set_read_timeout(Some(SILENCE));
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    std::iter::from_fn(move || {
        line.clear();
        Some(match reader.read_line(&mut line) {
            Ok(0) => Err(Lost::Gone),
            Ok(_) => serde_json::from_str(&line).map_err(|_| Lost::Gone),
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => Err(Lost::Silent),
            Err(_) => Err(Lost::Gone),
        })
    })
}

fn send(stream: &Mutex<TcpStream>, message: &impl Serialize) -> std::io::Result<()> {
    let line = serde_json::to_string(message).map_err(std::io::Error::other)?;
    locked(stream).write_all(format!("{line}\n").as_bytes())
}

/// The greeting of a run's ranks.
fn greets(word: &str, ranks: usize) -> String {
    format!("{MAGIC} {} {ranks} {word}", env!("CARGO_PKG_VERSION"))
}

/// Reads a new connection's greeting, its kind (`control` or `data`) and its rank.
fn greeting(stream: &TcpStream) -> Option<(String, String, usize)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_nodelay(true).ok()?;
    stream.set_read_timeout(Some(GREETING)).ok()?;
    #[allow(clippy::unbuffered_bytes, reason = "a buffer would take what follows")]
    let mut bytes = stream.bytes();
    let mut line = || {
        let mut line = Vec::new();
        while line.len() < 512 {
            match bytes.next()?.ok()? {
                b'\n' => return String::from_utf8(line).ok(),
                byte => line.push(byte),
            }
        }
        None
    };
    let (greeting, kind, rank) = (line()?, line()?, line()?);
    stream.set_read_timeout(None).ok()?;
    Some((greeting, kind, rank.parse().ok()?))
}

/// Exchange through host memory, over the data channels.
#[derive(Debug)]
struct Host(Ranks);

impl HostExchange for Host {
    fn round(&self, sends: Vec<u8>, answer: &mut dyn FnMut(Vec<Vec<u8>>) -> Vec<Vec<u8>>) -> Vec<u8> {
        match &self.0.link {
            Link::Only => answer(vec![sends]).swap_remove(0),
            Link::First(first) => {
                let mut others = locked(&first.data);
                let received = others.iter_mut().map(receive).collect::<std::io::Result<Vec<_>>>();
                let done = received.and_then(|received| {
                    let parts = std::iter::once(sends).chain(received).collect();
                    let mut answers = answer(parts).into_iter();
                    let own = answers.next().unwrap_or_default();
                    others.iter_mut().zip(answers).try_for_each(|(other, part)| give(other, &part))?;
                    Ok(own)
                });
                done.unwrap_or_else(|error| {
                    thread::sleep(ELSEWHERE);
                    first.fail(&format!("the exchange between ranks failed: {error}"))
                })
            }
            Link::Other(other) => {
                let mut first = locked(&other.data);
                let done = give(&mut first, &sends).and_then(|()| receive(&mut first));
                done.unwrap_or_else(|error| other.lost(&format!("the exchange between ranks failed: {error}")))
            }
        }
    }
}

fn give(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(bytes)
}

fn receive(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let mut bytes = vec![0; u64::from_le_bytes(length) as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
