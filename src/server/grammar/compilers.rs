//! Threads that compile grammars, separate from the HTTP threads.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{Compiled, Full};
use crate::failure::Failure;

/// Maximum number of grammars compiled at a time; the remaining cores serve other requests.
const THREADS: usize = 2;
/// Stack of a thread, committed on use: the deepest allowed schema takes a few MiB.
const STACK: usize = 256 << 20;
/// Maximum number of waiting grammars.
const WAITING: usize = 64;
/// Time limit of a grammar. The slowest known ones within the limits take two seconds of a core,
/// unoptimized.
const LONGEST: Duration = Duration::from_secs(10);
/// Maximum number of abandoned threads that still run. Above it no grammars are accepted until one
/// ends.
const GIVEN_UP: usize = 4;

type Work = Box<dyn FnOnce() -> Compiled + Send>;
type Reply = oneshot::Sender<Compiled>;

/// Compiles grammars in order. Threads start when there is work and end when there is none.
pub(super) struct Compilers {
    state: Mutex<State>,
    most: usize,
    longest: Duration,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(Work, Reply)>,
    running: Vec<Running>,
    given_up: usize,
    /// The id of the next job.
    next: u64,
}

/// A compiler thread.
struct Running {
    name: u64,
    begun: Instant,
    reply: Reply,
}

impl Compilers {
    pub(super) fn new() -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with(THREADS.min(cores.div_ceil(2)), LONGEST)
    }

    fn with(most: usize, longest: Duration) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), most, longest })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work`, which must not panic, once a thread is free, unless its client is gone by then.
    ///
    /// # Errors
    /// If the queue is full.
    pub(super) fn ask(self: &Arc<Self>, work: Work) -> Result<oneshot::Receiver<Compiled>, Full> {
        let (reply, receiver) = oneshot::channel();
        let mut state = self.lock();
        state.waiting.retain(|(_, reply)| !reply.is_closed());
        if state.waiting.len() >= WAITING || state.given_up >= GIVEN_UP {
            return Err(Full);
        }
        state.waiting.push_back((work, reply));
        self.start(&mut state);
        Ok(receiver)
    }

    /// Abandons jobs that take too long and continues with the others. Waiting callers call this at
    /// intervals.
    pub(super) fn mend(self: &Arc<Self>) {
        let mut state = self.lock();
        let (late, running) = std::mem::take(&mut state.running)
            .into_iter()
            .partition::<Vec<Running>, _>(|running| running.begun.elapsed() > self.longest);
        state.running = running;
        state.given_up += late.len();
        for Running { reply, .. } in late {
            let seconds = self.longest.as_secs();
            // The client may be gone.
            let _ = reply.send(Err(Failure::usage(format!("compiling it takes longer than {seconds} s"))));
        }
        self.start(&mut state);
    }

    /// Starts as many threads as the work needs and the limit allows.
    fn start(self: &Arc<Self>, state: &mut State) {
        while state.running.len() < self.most
            && let Some((work, reply)) = next(&mut state.waiting)
        {
            let name = state.next;
            state.next += 1;
            state.running.push(Running { name, begun: Instant::now(), reply });
            let compilers = Arc::clone(self);
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
            if let Err(error) = thread.spawn(move || compilers.run(name, work)) {
                let failure = Failure::new(format!("no thread for a grammar: {error}"));
                state.finish(name, Err(failure));
            }
        }
    }

    /// Runs jobs until none waits or another thread takes over.
    fn run(self: Arc<Self>, mut name: u64, mut work: Work) {
        loop {
            let compiled = work();
            let mut state = self.lock();
            if !state.finish(name, compiled) {
                state.given_up -= 1;
                return;
            }
            let Some((more, reply)) = next(&mut state.waiting) else { return };
            (name, work) = (state.next, more);
            state.next += 1;
            state.running.push(Running { name, begun: Instant::now(), reply });
        }
    }
}

impl State {
    /// Delivers the result of a job; false if it was abandoned.
    fn finish(&mut self, name: u64, compiled: Compiled) -> bool {
        let Some(at) = self.running.iter().position(|running| running.name == name) else { return false };
        // The client may be gone.
        let _ = self.running.swap_remove(at).reply.send(compiled);
        true
    }
}

/// The next job whose client still waits.
fn next(waiting: &mut VecDeque<(Work, Reply)>) -> Option<(Work, Reply)> {
    std::iter::from_fn(|| waiting.pop_front()).find(|(_, reply)| !reply.is_closed())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn done() -> Compiled {
        Err(Failure::usage("done"))
    }

    fn reason(receiver: oneshot::Receiver<Compiled>) -> String {
        receiver.blocking_recv().expect("an answer").err().expect("a reason").to_string()
    }

    #[test]
    fn work_beyond_the_room_is_refused_and_the_rest_is_done() {
        let compilers = Compilers::with(2, LONGEST);
        let gate = Arc::new(Mutex::new(()));
        let closed = gate.lock().expect("a gate");
        let mut asked = Vec::new();
        loop {
            let gate = Arc::clone(&gate);
            let work = move || {
                drop(gate.lock());
                done()
            };
            match compilers.ask(Box::new(work)) {
                Ok(receiver) => asked.push(receiver),
                Err(Full) => break,
            }
        }
        assert_eq!(asked.len(), WAITING + 2);
        // Jobs whose clients are gone make room.
        drop(asked.pop());
        asked.push(compilers.ask(Box::new(done)).expect("room"));
        drop(closed);
        assert!(asked.into_iter().map(reason).all(|reason| reason == "done"));
    }

    #[test]
    fn what_nobody_waits_for_is_not_done() {
        let compilers = Compilers::with(1, LONGEST);
        let (open, gate) = channel::<()>();
        let first = compilers.ask(Box::new(move || {
            let _ = gate.recv();
            done()
        }));
        let second = compilers.ask(Box::new(|| panic!("nobody waits for it"))).expect("room");
        let third = compilers.ask(Box::new(done)).expect("room");
        drop((second, open));
        assert_eq!((reason(first.expect("room")), reason(third)), ("done".into(), "done".into()));
    }

    #[test]
    fn what_takes_too_long_is_given_up_and_the_others_go_on() {
        let compilers = Compilers::with(1, Duration::from_millis(20));
        let gates: Vec<_> = (0..GIVEN_UP)
            .map(|_| {
                let (open, gate) = channel::<()>();
                let slow = compilers.ask(Box::new(move || {
                    let _ = gate.recv();
                    done()
                }));
                let other = compilers.ask(Box::new(done));
                std::thread::sleep(Duration::from_millis(30));
                compilers.mend();
                assert!(reason(slow.expect("room")).contains("longer than"));
                if let Ok(other) = other {
                    assert_eq!(reason(other), "done");
                }
                open
            })
            .collect();
        assert!(compilers.ask(Box::new(done)).is_err());
        drop(gates);
        while compilers.lock().given_up > 0 {
            std::thread::yield_now();
        }
        assert_eq!(reason(compilers.ask(Box::new(done)).expect("room")), "done");
    }
}
