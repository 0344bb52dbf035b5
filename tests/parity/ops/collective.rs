//! Exchange between ranks.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use burn::tensor::Tensor;
use fireclay_kernels::{Backend, Collective, HostExchange, Rank, all_gather, all_reduce, reduce_scatter};

use crate::backend_test;
use crate::compare::{random, values};

backend_test!(sums_over_one_rank_are_its_own_tensors::<B>(device) {
    let tensors: Vec<Tensor<B, 1>> = [1, 7, 300].map(|size| random::<B, 1>(size as u64, [size], &device)).into();
    let wanted: Vec<_> = tensors.iter().map(values).collect();
    for exchanged in [all_reduce, reduce_scatter, all_gather] {
        let own = exchanged(tensors.clone(), &Collective::only());
        assert_eq!(own.iter().map(values).collect::<Vec<_>>(), wanted);
    }
});

/// The bytes that a rank has given, if it has.
type Part = Option<Vec<u8>>;

/// A way between threads, each of which is a rank.
#[derive(Debug)]
struct Meeting {
    ranks: usize,
    /// What was sent, of those that have, and the answers not yet taken.
    state: Mutex<(Vec<Part>, Vec<Part>)>,
    changed: Condvar,
}

#[derive(Debug)]
struct At(Arc<Meeting>, usize);

impl HostExchange for At {
    fn round(&self, sends: Vec<u8>, answer: &mut dyn FnMut(Vec<Vec<u8>>) -> Vec<Vec<u8>>) -> Vec<u8> {
        let Self(meeting, rank) = self;
        let mut state = meeting.state.lock().expect("no panic");
        while state.0[*rank].is_some() || state.1[*rank].is_some() {
            state = meeting.changed.wait(state).expect("no panic");
        }
        state.0[*rank] = Some(sends);
        loop {
            let all_sent = state.0.iter().all(Option::is_some) && state.1.iter().all(Option::is_none);
            if *rank == 0 && all_sent {
                let parts = state.0.iter_mut().map(|part| part.take().expect("all have sent")).collect();
                let answers = answer(parts);
                assert_eq!(answers.len(), meeting.ranks);
                state.1 = answers.into_iter().map(Some).collect();
            }
            meeting.changed.notify_all();
            match state.1[*rank].take() {
                Some(own) => return own,
                None => state = meeting.changed.wait(state).expect("no panic"),
            }
        }
    }
}

/// What each of `ranks` gets, a thread each; `work` is given a rank's collective and number.
fn of_ranks<B: Backend>(
    ranks: usize,
    work: impl Fn(&Collective, usize) -> Vec<Tensor<B, 1>> + Sync,
) -> Vec<Vec<Vec<f32>>> {
    let nothing = || vec![None; ranks];
    let meeting = Meeting { ranks, state: Mutex::new((nothing(), nothing())), changed: Condvar::new() };
    let meeting = Arc::new(meeting);
    // By the test's own name, by which its results are told.
    let name = thread::current().name().unwrap_or("ranks").to_string();
    thread::scope(|scope| {
        let rank = |rank: usize| {
            let (meeting, work) = (Arc::clone(&meeting), &work);
            let run = move || {
                let collective = Collective::through_host(Rank { rank, ranks }, Arc::new(At(meeting, rank)));
                work(&collective, rank).iter().map(values).collect::<Vec<_>>()
            };
            thread::Builder::new().name(name.clone()).spawn_scoped(scope, run).expect("a thread")
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

const LENGTHS: [usize; 3] = [6, 66, 3000];

fn own<B: Backend>(rank: usize, device: &B::Device) -> Vec<Tensor<B, 1>> {
    LENGTHS.map(|size| random::<B, 1>((size + rank) as u64, [size], device)).into()
}

/// The sums of all ranks' tensors in the order of the ranks, as f32 adds.
fn sums<B: Backend>(ranks: usize, device: &B::Device) -> Vec<Vec<f32>> {
    let all: Vec<Vec<Vec<f32>>> = (0..ranks).map(|rank| own::<B>(rank, device).iter().map(values).collect()).collect();
    let sum =
        |tensor: usize, at: usize| all.iter().skip(1).fold(all[0][tensor][at], |sum, rank| sum + rank[tensor][at]);
    (0..LENGTHS.len()).map(|tensor| (0..LENGTHS[tensor]).map(|at| sum(tensor, at)).collect()).collect()
}

backend_test!(every_rank_gets_the_sums_of_all::<B>(device) {
    for ranks in [2, 3] {
        let found = of_ranks::<B>(ranks, |collective, rank| all_reduce(own(rank, &device), collective));
        assert_eq!(found, vec![sums::<B>(ranks, &device); ranks], "{ranks} ranks");
    }
});

backend_test!(every_rank_gets_its_part_of_the_sums::<B>(device) {
    for ranks in [2, 3] {
        let found = of_ranks::<B>(ranks, |collective, rank| reduce_scatter(own(rank, &device), collective));
        let sums = sums::<B>(ranks, &device);
        for (rank, parts) in found.iter().enumerate() {
            let part = |sum: &Vec<f32>| sum[rank * sum.len() / ranks..(rank + 1) * sum.len() / ranks].to_vec();
            assert_eq!(*parts, sums.iter().map(part).collect::<Vec<_>>(), "rank {rank} of {ranks}");
        }
    }
});

backend_test!(every_rank_gets_the_tensors_of_all_in_their_order::<B>(device) {
    for ranks in [2, 3] {
        let found = of_ranks::<B>(ranks, |collective, rank| all_gather(own(rank, &device), collective));
        let of_rank = |rank: usize| own::<B>(rank, &device).iter().map(values).collect::<Vec<_>>();
        let all: Vec<Vec<Vec<f32>>> = (0..ranks).map(of_rank).collect();
        let whole = |tensor: usize| all.iter().flat_map(|rank| rank[tensor].clone()).collect::<Vec<f32>>();
        let wanted: Vec<Vec<f32>> = (0..LENGTHS.len()).map(whole).collect();
        assert_eq!(found, vec![wanted; ranks], "{ranks} ranks");
    }
});
