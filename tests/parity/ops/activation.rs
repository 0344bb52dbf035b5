//! Activations against the reference.

use fireclay_kernels::{Activation, ActivationKind, activate};

use crate::backend_test;
use crate::compare::random;
use crate::harness::{assert_parity, strided};
use crate::plain;

backend_test!(activations_match_the_reference::<B>(device) {
    for kind in ActivationKind::ALL {
        for gated in [false, true] {
            let activation = Activation { kind, gated };
            for (rows, columns) in [(1, 2), (3, 64), (65, 130), (2, 1000)] {
                let x = random::<B, 2>(1, [rows, columns], &device) * 6.0;
                assert_parity(
                    &format!("{activation:?} {rows}x{columns}"),
                    &[strided(x)],
                    |x| activate(x[0].clone(), activation),
                    |x| plain::activate(x[0].clone(), activation),
                );
            }
        }
    }
});
