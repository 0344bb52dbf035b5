//! Rotary embeddings against the reference.

use std::slice::from_ref;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor, TensorData};
use fireclay_kernels::{PackedHeads, RotaryTable, qkv_rotary, rotary};

use crate::backend_test;
use crate::compare::random;
use crate::harness::{assert_parity, strided};
use crate::plain;

backend_test!(rotary_matches_the_reference::<B>(device) {
    for [batch_size, heads, seq_length, head_dim, half] in
        [[1, 1, 1, 2, 1], [2, 3, 5, 6, 3], [1, 2, 65, 64, 32], [2, 3, 5, 6, 2], [1, 2, 9, 64, 24], [1, 1, 7, 8, 1]]
    {
        let x = random::<B, 4>(1, [batch_size, heads, seq_length, head_dim], &device);
        let frequencies: Vec<f64> = (0..half).map(|i| 0.7f64.powi(i as i32)).collect();
        let positions: Vec<i32> = (0..batch_size * seq_length).map(|at| (at * 7 % 90) as i32).collect();
        let positions =
            Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(positions, [batch_size, seq_length]), &device);
        let table = RotaryTable::<Autodiff<B>>::new(90, &frequencies, 1.1, &device);
        assert_parity(
            &format!("rotary {batch_size}x{heads}x{seq_length}x{head_dim}, {half} pairs"),
            &[strided(x)],
            |x| rotary(x[0].clone(), &table, positions.clone()),
            |x| plain::rotary(x[0].clone(), &table, positions.clone()),
        );
    }
});

backend_test!(qkv_rotary_matches_the_reference::<B>(device) {
    for ([batch_size, seq_length, n_heads, n_kv_heads, head_dim], half) in [
        ([1, 1, 1, 1, 2], 1),
        ([2, 5, 3, 1, 6], 3),
        ([1, 65, 4, 2, 64], 32),
        ([3, 33, 6, 6, 8], 4),
        ([2, 5, 3, 1, 6], 1),
        ([1, 33, 4, 2, 64], 24),
    ] {
        let heads = PackedHeads { n_heads, n_kv_heads, head_dim };
        let name = format!("qkv_rotary {batch_size}x{seq_length}, {heads:?}, {half} pairs");
        let qkv = random::<B, 3>(1, [batch_size, seq_length, heads.width()], &device);
        let frequencies: Vec<f64> = (0..half).map(|i| 0.7f64.powi(i)).collect();
        let table = RotaryTable::<Autodiff<B>>::new(90, &frequencies, 1.1, &device);
        let positions: Vec<i32> = (0..seq_length).map(|at| (at * 7 % 90) as i32).collect();
        let positions = Tensor::<Autodiff<B>, 2, Int>::from_data(TensorData::new(positions, [1, seq_length]), &device);
        let positions = positions.expand([batch_size, seq_length]);
        for qkv in [qkv.clone(), strided(qkv)] {
            // Once over an unshared tensor, once over one that the caller keeps.
            for kept in [false, true] {
                let ours = |i: &[Tensor<Autodiff<B>, 3>]| {
                    let qkv = if kept { i[0].clone() } else { i[0].clone() * 1.0 };
                    qkv_rotary(qkv, heads, &table, positions.clone())
                };
                assert_parity(&name, from_ref(&qkv), ours, |i| {
                    plain::qkv_rotary(i[0].clone(), heads, &table, positions.clone())
                });
            }
        }
    }
});
