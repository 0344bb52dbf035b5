//! What waits for the device: in turn for each client, and no more than there is room for.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::engine::Job;
use super::keys::Client;

/// Jobs that wait.
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Waiting {
    /// A line for each client; the next job is the first of the first line, which goes behind the others then.
    lines: VecDeque<(Client, VecDeque<Job>)>,
    jobs: usize,
    closed: bool,
    woken: bool,
}

/// There is no room.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Full;

impl Queue {
    pub(super) fn new(most: usize) -> Self {
        Self { waiting: Mutex::default(), changed: Condvar::new(), most }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts all of a client's jobs into its line, or none. A client may have half of the room, so that there is some for others.
    pub(super) fn push(&self, client: Client, jobs: Vec<Job>) -> Result<(), Full> {
        let mut waiting = self.lock();
        let fits = |waiting: &Waiting| {
            let own = waiting.lines.iter().find(|(other, _)| *other == client).map_or(0, |(_, line)| line.len());
            waiting.jobs + jobs.len() <= self.most && own + jobs.len() <= self.most.div_ceil(2)
        };
        if !fits(&waiting) {
            waiting.forget_abandoned();
        }
        if waiting.closed || !fits(&waiting) {
            return Err(Full);
        }
        waiting.jobs += jobs.len();
        match waiting.lines.iter_mut().find(|(other, _)| *other == client) {
            Some((_, line)) => line.extend(jobs),
            None => waiting.lines.push_back((client, jobs.into())),
        }
        drop(waiting);
        self.changed.notify_all();
        Ok(())
    }

    /// The next job that someone still waits for.
    pub(super) fn pop(&self) -> Option<Job> {
        let mut waiting = self.lock();
        loop {
            let (client, mut line) = waiting.lines.pop_front()?;
            let job = line.pop_front();
            if !line.is_empty() {
                waiting.lines.push_back((client, line));
            }
            if let Some(job) = job {
                waiting.jobs -= 1;
                if !job.is_abandoned() {
                    return Some(job);
                }
            }
        }
    }

    /// Waits until there is a job, or [`wake`](Self::wake) is called, but no longer than that.
    pub(super) fn wait(&self, longest: Duration) {
        let waiting = self.lock();
        let idle = |waiting: &mut Waiting| waiting.jobs == 0 && !waiting.woken && !waiting.closed;
        let (mut waiting, _) =
            self.changed.wait_timeout_while(waiting, longest, idle).unwrap_or_else(PoisonError::into_inner);
        waiting.woken = false;
    }

    /// Ends a wait.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Takes nothing more, and drops what there is.
    pub(super) fn close(&self) {
        *self.lock() = Waiting { closed: true, ..Waiting::default() };
        self.changed.notify_all();
    }

    /// Jobs that wait.
    pub(super) fn len(&self) -> usize {
        self.lock().jobs
    }
}

impl Waiting {
    fn forget_abandoned(&mut self) {
        self.lines.iter_mut().for_each(|(_, line)| line.retain(|job| !job.is_abandoned()));
        self.lines.retain(|(_, line)| !line.is_empty());
        self.jobs = self.lines.iter().map(|(_, line)| line.len()).sum();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::sync::oneshot;

    use super::*;

    fn client(number: u8) -> Client {
        Client { key: 0, address: IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)) }
    }

    /// A job of a name, and what makes it abandoned when it is dropped.
    fn job(name: &str) -> (Job, impl Sized) {
        let (reply, waits) = oneshot::channel();
        (Job::Predict { texts: vec![name.to_string()], reply }, waits)
    }

    fn name(job: &Job) -> &str {
        match job {
            Job::Predict { texts, .. } => &texts[0],
            _ => "another",
        }
    }

    #[test]
    fn clients_take_turns() {
        let queue = Queue::new(20);
        let mut waits = Vec::new();
        for (who, names) in [(1, vec!["a1", "a2", "a3"]), (2, vec!["b1"]), (3, vec!["c1", "c2"])] {
            let (jobs, kept): (Vec<Job>, Vec<_>) = names.into_iter().map(job).unzip();
            waits.push(kept);
            queue.push(client(who), jobs).expect("room");
        }
        let order: Vec<String> = std::iter::from_fn(|| queue.pop()).map(|job| name(&job).to_string()).collect();
        assert_eq!(order, ["a1", "b1", "c1", "a2", "c2", "a3"]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn what_nobody_waits_for_makes_room() {
        let queue = Queue::new(4);
        let (first, kept) = job("first");
        let (second, gone) = job("second");
        queue.push(client(1), vec![first, second]).expect("room");
        let (third, _third) = job("third");
        assert_eq!(queue.push(client(1), vec![third]), Err(Full), "half of the room is for others");
        let (others, _others): (Vec<Job>, Vec<_>) = ["x", "y", "z"].map(job).into_iter().unzip();
        assert_eq!(queue.push(client(2), others), Err(Full), "all or none");
        drop(gone);
        let (third, _third) = job("third");
        queue.push(client(1), vec![third]).expect("room");
        assert_eq!(queue.pop().as_ref().map(name), Some("first"));
        drop(kept);
        assert_eq!(queue.pop().as_ref().map(name), Some("third"));
        queue.close();
        let (late, _late) = job("late");
        assert_eq!(queue.push(client(1), vec![late]), Err(Full));
    }
}
