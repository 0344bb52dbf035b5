//! Norms of packed heads against the reference.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use fireclay_kernels::{Backend, HeadNorms, Norm, PackedHeads, qkv_norm};

use crate::backend_test;
use crate::compare::random;
use crate::harness::{assert_parity, strided};
use crate::plain;

/// Norms with the scales `[1, 1, head_dim]`.
fn norms<B: Backend>(query: &Tensor<B, 3>, key: &Tensor<B, 3>) -> HeadNorms<B> {
    let scale = |x: &Tensor<B, 3>| x.clone().flatten::<1>(0, 2);
    HeadNorms { query: Norm::rms(scale(query), 1e-5), key: Norm::rms(scale(key), 1e-2) }
}

backend_test!(qkv_norm_matches_the_reference::<B>(device) {
    for [batch_size, seq_length, n_heads, n_kv_heads, head_dim] in [
        [1, 1, 1, 1, 2],
        [2, 5, 3, 1, 6],
        [1, 65, 4, 2, 64],
        [3, 33, 6, 6, 9],
        [2, 130, 4, 2, 128],
        [1, 7, 2, 1, 320],
        [1, 3, 2, 2, 520],
        // More rows than units: a unit adds up gradients of several.
        [1, 1100, 4, 2, 128],
    ] {
        let heads = PackedHeads { n_heads, n_kv_heads, head_dim };
        let qkv = random::<B, 3>(1, [batch_size, seq_length, heads.width()], &device);
        let [query, key] = [2, 3].map(|seed| random::<B, 3>(seed, [1, 1, head_dim], &device) + 1.0);
        for qkv in [qkv.clone(), strided(qkv)] {
            let what = format!("qkv_norm {batch_size}x{seq_length}, {heads:?}");
            assert_parity(
                &what,
                &[qkv.clone(), query.clone(), key.clone()],
                |i| qkv_norm(i[0].clone(), heads, norms(&i[1], &i[2])),
                |i| plain::qkv_norm(i[0].clone(), heads, norms(&i[1], &i[2])),
            );
            let frozen = || [&query, &key].map(|x| Tensor::<Autodiff<B>, 3>::from_inner(x.clone()));
            let [query, key] = frozen();
            assert_parity(
                &format!("{what}, frozen"),
                &[qkv],
                |i| qkv_norm(i[0].clone(), heads, norms(&query, &key)),
                |i| plain::qkv_norm(i[0].clone(), heads, norms(&query, &key)),
            );
        }
    }
});
