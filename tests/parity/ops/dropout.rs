//! Dropout against the reference.

use fireclay_kernels::{Dropout, RandomKey, dropout};

use crate::backend_test;
use crate::compare::{random, values};
use crate::harness::{assert_parity, strided};
use crate::plain;

backend_test!(rows_of_a_batch_drop_what_they_drop_in_the_whole_of_it::<B>(device) {
    let key = RandomKey::new(9).fold(70_000);
    let x = random::<B, 2>(2, [90, 130], &device);
    let whole = values(&dropout(x.clone(), Dropout { probability: 0.4, key }));
    for first in [0, 1, 57, 89] {
        let part = x.clone().narrow(0, first, 90 - first);
        let what = Dropout { probability: 0.4, key: key.from_row(first) };
        assert_eq!(values(&dropout(part.clone(), what)), whole[130 * first..], "from row {first}");
        assert_eq!(values(&plain::dropout(part, what)), whole[130 * first..], "the reference from row {first}");
    }
});

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
