//! Sharding of parameters among ranks: reduction of gradients, the global norm, and gathering.

use burn::tensor::{DType, Tensor};
use fireclay_kernels::{Backend, Collective, Rank, all_gather, all_reduce, gradient_norm, reduce_scatter};

use crate::recipe::schema::{Reduce, Shard};

/// Piece sizes are multiples of this, so that pieces begin at aligned addresses.
const UNIT: usize = 256;

/// How ranks share the optimizer's work.
#[derive(Clone, Debug)]
pub struct Sharding {
    /// Exchanges tensors between the ranks.
    pub collective: Collective,
    /// What is sharded.
    pub shard: Shard,
    /// Dtype in which gradients are reduced.
    pub reduce: Reduce,
}

impl Sharding {
    /// For one rank.
    pub fn only() -> Self {
        Self { collective: Collective::only(), shard: Shard::None, reduce: Reduce::F32 }
    }

    pub(super) fn has_others(&self) -> bool {
        self.collective.rank().ranks > 1
    }
}

/// The elements of a parameter that a rank owns: a piece, as long as every other rank's, and the
/// tail after all pieces, which every rank has. Parameters that are not matrices consist of the
/// tail alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Size of the whole parameter.
    pub(super) elements: usize,
    piece: usize,
    rank: Rank,
}

impl Share {
    pub(super) fn of(shape: &[usize], rank: Rank) -> Self {
        let elements = shape.iter().product();
        let piece = if shape.len() > 1 && rank.ranks > 1 { elements / rank.ranks / UNIT * UNIT } else { 0 };
        Self { elements, piece, rank }
    }

    /// The same parameter, unsharded.
    pub(super) fn whole(self) -> Self {
        Self { piece: 0, ..self }
    }

    /// Whether the parameter is sharded.
    pub(super) fn is_part(self) -> bool {
        self.piece > 0
    }

    fn pieces(self) -> usize {
        self.piece * self.rank.ranks
    }

    fn tail(self) -> usize {
        self.elements - self.pieces()
    }

    /// Number of elements that this rank owns.
    pub(super) fn len(self) -> usize {
        self.piece + self.tail()
    }

    /// Ranges of the owned elements in the whole parameter: piece and tail.
    pub(super) fn ranges(self) -> [std::ops::Range<usize>; 2] {
        let begin = self.rank.rank * self.piece;
        [begin..begin + self.piece, self.pieces()..self.elements]
    }

    /// The elements of `whole` that this rank owns.
    pub(super) fn cut<B: Backend>(self, whole: Tensor<B, 1>) -> Tensor<B, 1> {
        let ranges = self.ranges().into_iter().filter(|range| !range.is_empty());
        let mut parts: Vec<_> = ranges.map(|range| whole.clone().narrow(0, range.start, range.len())).collect();
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
    }
}

/// Reduces gradients over all ranks. Returns this rank's shards of the sums, and the global norm of
/// the sums, `[1]`. Also sums `numbers`, such as a loss.
pub(super) fn reduce<B: Backend>(
    gradients: Vec<Tensor<B, 1>>,
    shares: &[Share],
    numbers: Tensor<B, 1>,
    sharding: &Sharding,
) -> (Vec<Tensor<B, 1>>, Tensor<B, 1>, Tensor<B, 1>) {
    let Sharding { collective, shard, reduce } = sharding;
    let (device, [count]) = (numbers.device(), numbers.dims());
    let gradients: Vec<Tensor<B, 1>> = match reduce {
        Reduce::F32 => gradients,
        Reduce::Bf16 => gradients.into_iter().map(|gradient| gradient.cast(DType::BF16)).collect(),
    };
    let is_first = collective.rank().rank == 0;
    let sums: Vec<Tensor<B, 1>> = match shard {
        Shard::None => exact(all_reduce(gradients, collective)),
        Shard::Optimizer => reduce_to_shares(gradients, shares, collective),
    };
    // Every rank has the tail, but only rank 0 counts it in the norm.
    let mut counted = Vec::new();
    for (sum, share) in sums.iter().zip(shares) {
        let [piece, tail] = share.ranges();
        let whole = sum.dims()[0] == share.elements;
        let piece_at = if whole { piece.start } else { 0 };
        let tail_at = if whole { tail.start } else { share.piece };
        let parts = [(piece_at, piece.len()), (tail_at, if is_first { tail.len() } else { 0 })];
        counted.extend(parts.into_iter().filter(|(_, length)| *length > 0).map(|(at, length)| narrow(sum, at, length)));
    }
    let norm = if counted.is_empty() { Tensor::zeros([1], &device) } else { gradient_norm(counted) };
    let totals = all_reduce(vec![Tensor::cat(vec![norm.clone() * norm, numbers], 0)], collective).remove(0);
    (sums, totals.clone().narrow(0, 0, 1).sqrt(), totals.narrow(0, 1, count))
}

/// This rank's shards of the summed gradients.
fn reduce_to_shares<B: Backend>(
    gradients: Vec<Tensor<B, 1>>,
    shares: &[Share],
    collective: &Collective,
) -> Vec<Tensor<B, 1>> {
    let (mut pieces, mut tails) = (Vec::new(), Vec::new());
    for (gradient, share) in gradients.iter().zip(shares) {
        if share.is_part() {
            pieces.push(narrow(gradient, 0, share.pieces()));
        }
        if share.tail() > 0 {
            tails.push(narrow(gradient, share.pieces(), share.tail()));
        }
    }
    drop(gradients);
    let mut pieces = exact(reduce_scatter(pieces, collective)).into_iter();
    let mut tails = exact(all_reduce(tails, collective)).into_iter();
    let own = |share: &Share| {
        let piece = share.is_part().then(|| pieces.next()).flatten();
        let tail = (share.tail() > 0).then(|| tails.next()).flatten();
        let mut parts: Vec<_> = piece.into_iter().chain(tail).collect();
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
    };
    shares.iter().map(own).collect()
}

fn exact<B: Backend>(sums: Vec<Tensor<B, 1>>) -> Vec<Tensor<B, 1>> {
    sums.into_iter().map(|sum| sum.cast(DType::F32)).collect()
}

fn narrow<B: Backend>(tensor: &Tensor<B, 1>, at: usize, length: usize) -> Tensor<B, 1> {
    match tensor.dims() {
        [whole] if whole == length => tensor.clone(),
        _ => tensor.clone().narrow(0, at, length),
    }
}

/// Gathers whole parameters from every rank's shards. All have one dtype.
pub(super) fn gather<B: Backend>(
    parts: Vec<Tensor<B, 1>>,
    shares: &[Share],
    collective: &Collective,
) -> Vec<Tensor<B, 1>> {
    let pieces = parts.iter().zip(shares).map(|(part, share)| narrow(part, 0, share.piece));
    let wholes = all_gather(pieces.collect(), collective);
    let joined = wholes.into_iter().zip(parts).zip(shares).map(|((whole, part), share)| match share.tail() {
        0 => whole,
        tail => Tensor::cat(vec![whole, narrow(&part, share.piece, tail)], 0),
    });
    joined.collect()
}

#[cfg(test)]
mod tests {
    use burn::backend::NdArray;

    use super::*;

    #[test]
    fn shares_cover_every_element_and_pieces_overlap_nowhere() {
        for (shape, ranks) in [([7, 1000], 3), ([512, 1], 2), ([3, 5], 2), ([50_257, 768], 8)] {
            let elements = shape[0] * shape[1];
            let shares: Vec<Share> = (0..ranks).map(|rank| Share::of(&shape, Rank { rank, ranks })).collect();
            let mut next = 0;
            for share in &shares {
                let [piece, tail] = share.ranges();
                assert_eq!((piece.start, tail.end), (next, elements), "{shape:?} of {ranks}");
                assert_eq!(piece.len() + tail.len(), share.len());
                next = piece.end;
            }
            assert_eq!(shares[0].ranges()[1].start, next);
        }
        assert!(!Share::of(&[768], Rank { rank: 0, ranks: 2 }).is_part(), "vectors stay whole");
    }

    #[test]
    fn a_share_is_cut_out_of_the_whole() {
        let whole = Tensor::<NdArray, 1>::from_floats(
            (0..1000).map(|at| at as f32).collect::<Vec<_>>().as_slice(),
            &Default::default(),
        );
        let share = Share::of(&[10, 100], Rank { rank: 1, ranks: 3 });
        let own: Vec<f32> = share.cut(whole).into_data().iter().collect();
        let wanted: Vec<f32> = (256..512).chain(768..1000).map(|at| at as f32).collect();
        assert_eq!(own, wanted);
    }
}
