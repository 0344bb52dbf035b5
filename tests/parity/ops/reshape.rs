//! Reshapes against Burn's.

use fireclay_kernels::reshape;

use crate::backend_test;
use crate::compare::random;
use crate::harness::{assert_parity, strided};

backend_test!(reshape_keeps_elements_in_their_order::<B>(device) {
    let x = random::<B, 2>(1, [6, 35], &device);
    for x in [x.clone(), strided(x)] {
        assert_parity(
            "reshape",
            &[x],
            |x| reshape(x[0].clone() * 2.0, [2, 21, 5]) + reshape(x[0].clone(), [2, 21, 5]),
            |x| x[0].clone().reshape([2, 21, 5]) * 3.0,
        );
    }
});
