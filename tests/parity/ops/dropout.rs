//! Dropout against the reference.

use fireclay_kernels::{Dropout, RandomKey, dropout};

use crate::backend_test;
use crate::compare::random;
use crate::harness::{assert_parity, strided};
use crate::plain;

backend_test!(dropout_drops_and_scales_as_its_key_says::<B>(device) {
    for (rows, columns) in [(1, 1), (63, 65), (3, 1000)] {
        let what = Dropout { probability: 0.3, key: RandomKey::new(4) };
        let x = strided(random::<B, 2>(1, [rows, columns], &device));
        assert_parity(
            &format!("dropout {rows}x{columns}"),
            &[x],
            |x| dropout(x[0].clone(), what),
            |x| plain::dropout(x[0].clone(), what),
        );
    }
});
