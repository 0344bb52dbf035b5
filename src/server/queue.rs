//! The bounded queue of jobs for the device, fair between clients.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::engine::Job;
use super::keys::Client;

/// The waiting requests, each with its jobs.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Waiting {
    /// One queue per client. The next job comes from the first queue, which then moves to the end.
    lines: VecDeque<Line>,
    closed: bool,
    woken: bool,
}

struct Line {
    client: Client,
    /// Preempted jobs, which precede requests that have not started.
    preempted: VecDeque<Job>,
    requests: VecDeque<Waits>,
}

/// A waiting request, or its remaining jobs.
struct Waits {
    priority: i64,
    jobs: VecDeque<Job>,
}

/// The queue is full.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

impl Queue {
    /// A queue of at most this many requests.
    pub(super) fn new(most: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request to its client's queue, before those with a higher priority number. One client
    /// may take half of the queue, so that room is left for others.
    pub(super) fn push(&self, client: Client, priority: i64, jobs: Vec<Job>) -> Result<(), Full> {
        let mut waiting = self.lock();
        let fits = |waiting: &Waiting| {
            let own = waiting.line(client).map_or(0, |line| line.requests.len());
            let all: usize = waiting.lines.iter().map(|line| line.requests.len()).sum();
            all < self.most && own < self.most.div_ceil(2)
        };
        if !fits(&waiting) {
            waiting.forget_abandoned();
        }
        if waiting.closed || !fits(&waiting) {
            return Err(Full);
        }
        let line = waiting.line_of(client);
        let at = line.requests.iter().position(|other| other.priority > priority).unwrap_or(line.requests.len());
        line.requests.insert(at, Waits { priority, jobs: jobs.into() });
        drop(waiting);
        self.changed.notify_all();
        Ok(())
    }

    /// Puts a preempted job back, before its client's other jobs. This never fails.
    pub(super) fn put_back(&self, client: Client, job: Job) {
        let mut waiting = self.lock();
        if !waiting.closed {
            waiting.line_of(client).preempted.push_front(job);
        }
    }

    /// The next job whose client still waits.
    pub(super) fn pop(&self) -> Option<(Client, Job)> {
        self.pop_of(|_| true)
    }

    /// The next job of a client that `wanted` accepts.
    pub(super) fn pop_of(&self, wanted: impl Fn(Client) -> bool) -> Option<(Client, Job)> {
        let mut waiting = self.lock();
        loop {
            let at = waiting.lines.iter().position(|line| wanted(line.client))?;
            let mut line = waiting.lines.remove(at)?;
            let (client, job) = (line.client, line.pop());
            if !line.is_empty() {
                waiting.lines.push_back(line);
            }
            if let Some(job) = job.filter(|job| !job.is_abandoned()) {
                return Some((client, job));
            }
        }
    }

    /// Clients with waiting jobs, in the order of their turns.
    pub(super) fn clients(&self) -> Vec<Client> {
        self.lock().lines.iter().map(|line| line.client).collect()
    }

    /// Waits for a job or a call of [`wake`](Self::wake), up to a time limit.
    pub(super) fn wait(&self, longest: Duration) {
        let waiting = self.lock();
        let idle = |waiting: &mut Waiting| waiting.lines.is_empty() && !waiting.woken && !waiting.closed;
        let (mut waiting, _) =
            self.changed.wait_timeout_while(waiting, longest, idle).unwrap_or_else(PoisonError::into_inner);
        waiting.woken = false;
    }

    /// Ends a wait.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Refuses further jobs and drops the waiting ones.
    pub(super) fn close(&self) {
        *self.lock() = Waiting { closed: true, ..Waiting::default() };
        self.changed.notify_all();
    }

    /// Number of waiting jobs.
    pub(super) fn len(&self) -> usize {
        self.lock().lines.iter().map(Line::len).sum()
    }
}

impl Waiting {
    fn line(&self, client: Client) -> Option<&Line> {
        self.lines.iter().find(|line| line.client == client)
    }

    /// A client's queue; a new one goes to the end.
    fn line_of(&mut self, client: Client) -> &mut Line {
        let at = self.lines.iter().position(|line| line.client == client).unwrap_or_else(|| {
            self.lines.push_back(Line { client, preempted: VecDeque::new(), requests: VecDeque::new() });
            self.lines.len() - 1
        });
        &mut self.lines[at]
    }

    fn forget_abandoned(&mut self) {
        for line in &mut self.lines {
            line.preempted.retain(|job| !job.is_abandoned());
            line.requests.iter_mut().for_each(|waits| waits.jobs.retain(|job| !job.is_abandoned()));
            line.requests.retain(|waits| !waits.jobs.is_empty());
        }
        self.lines.retain(|line| !line.is_empty());
    }
}

impl Line {
    fn pop(&mut self) -> Option<Job> {
        if let Some(job) = self.preempted.pop_front() {
            return Some(job);
        }
        let waits = self.requests.front_mut()?;
        let job = waits.jobs.pop_front();
        if waits.jobs.is_empty() {
            self.requests.pop_front();
        }
        job
    }

    fn len(&self) -> usize {
        self.preempted.len() + self.requests.iter().map(|waits| waits.jobs.len()).sum::<usize>()
    }

    fn is_empty(&self) -> bool {
        self.preempted.is_empty() && self.requests.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::sync::oneshot;

    use super::*;

    fn client(number: u8) -> Client {
        Client::of_address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    /// A named job, and a handle whose drop abandons it.
    fn job(name: &str) -> (Job, impl Sized + use<>) {
        let (reply, waits) = oneshot::channel();
        (Job::Predict { inputs: vec![name.to_string()], reply }, waits)
    }

    fn name(job: &Job) -> &str {
        match job {
            Job::Predict { inputs, .. } => &inputs[0],
            _ => "another",
        }
    }

    fn names(queue: &Queue) -> Vec<String> {
        std::iter::from_fn(|| queue.pop()).map(|(_, job)| name(&job).to_string()).collect()
    }

    #[test]
    fn clients_take_turns() {
        let queue = Queue::new(20);
        let mut waits = Vec::new();
        for (who, names) in [(1, vec!["a1", "a2", "a3"]), (2, vec!["b1"]), (3, vec!["c1", "c2"])] {
            let (jobs, kept): (Vec<Job>, Vec<_>) = names.into_iter().map(job).unzip();
            waits.push(kept);
            queue.push(client(who), 0, jobs).expect("room");
        }
        assert_eq!(queue.len(), 6);
        assert_eq!(names(&queue), ["a1", "b1", "c1", "a2", "c2", "a3"]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_request_of_many_jobs_has_one_place() {
        let queue = Queue::new(2);
        let (jobs, _kept): (Vec<Job>, Vec<_>) = (0..100).map(|_| job("many")).unzip();
        queue.push(client(1), 0, jobs).expect("room");
        let (second, _second) = job("second");
        assert_eq!(queue.push(client(1), 0, vec![second]), Err(Full), "half of the room is for others");
        assert_eq!(queue.len(), 100);
    }

    #[test]
    fn a_client_orders_its_own_requests_by_priority_and_no_others() {
        let queue = Queue::new(20);
        let mut waits = Vec::new();
        for (who, priority, name) in [(1, 0, "a0"), (1, 5, "a5"), (1, -1, "a-1"), (1, 0, "a0 again"), (2, 9, "b9")] {
            let (job, kept) = job(name);
            waits.push(kept);
            queue.push(client(who), priority, vec![job]).expect("room");
        }
        let (preempted, _kept) = job("preempted");
        queue.put_back(client(1), preempted);
        assert_eq!(queue.clients(), [client(1), client(2)]);
        assert_eq!(names(&queue), ["preempted", "b9", "a-1", "a0", "a0 again", "a5"]);
    }

    #[test]
    fn what_nobody_waits_for_makes_room() {
        let queue = Queue::new(4);
        let (first, kept) = job("first");
        let (second, gone) = job("second");
        queue.push(client(1), 0, vec![first]).expect("room");
        queue.push(client(1), 0, vec![second]).expect("room");
        let (third, _third) = job("third");
        assert_eq!(queue.push(client(1), 0, vec![third]), Err(Full), "half of the room is for others");
        drop(gone);
        let (third, _third) = job("third");
        queue.push(client(1), 0, vec![third]).expect("room");
        let (other, _other) = job("other");
        queue.push(client(2), 0, vec![other]).expect("room");
        assert_eq!(
            queue.pop_of(|other| other == client(1)).map(|(_, job)| name(&job).to_string()),
            Some("first".into())
        );
        drop(kept);
        assert_eq!(names(&queue), ["other", "third"]);
        queue.close();
        let (late, _late) = job("late");
        assert_eq!(queue.push(client(1), 0, vec![late]), Err(Full));
    }
}
