//! Lookups in a table against the reference.

use std::slice::from_ref;

use burn::backend::Autodiff;
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use fireclay_kernels::{HeadLossOptions, embed, embed_add, head_loss, next_positions};

use crate::backend_test;
use crate::compare::{assert_close, random, values};
use crate::harness::{assert_parity, dtype_under_test, integers, strided, with_gradients};
use crate::plain;

backend_test!(embed_matches_the_reference::<B>(device) {
    for [vocabulary, batch_size, seq_length, d_model] in [
        [1, 1, 1, 1],
        [2, 3, 5, 2],
        [63, 1, 700, 33],
        [65, 4, 500, 64],
        [1000, 2, 63, 130],
        [3000, 3, 300, 20],
        [513, 1, 2000, 3],
        [2000, 5, 1000, 37],
        [1500, 1, 200, 1030],
    ] {
        let name = format!("embed {vocabulary}x{d_model}, {batch_size}x{seq_length}");
        let table = random::<B, 2>(1, [vocabulary, d_model], &device);
        // Some tokens are frequent, the first and last two most of all, some do not occur; in
        // random order.
        let token = |at: usize| match at % 7 {
            2 => vocabulary.saturating_sub(1 + at % 2),
            _ => at * at * 31 % 1009 * (at % 3) % vocabulary,
        };
        let tokens: Vec<i32> = (0..batch_size * seq_length).map(|at| token(at) as i32).collect();
        let tokens = TensorData::new(tokens, [batch_size, seq_length]);
        let tokens = Tensor::<Autodiff<B>, 2, Int>::from_data(tokens, &device);
        for table in [table.clone(), strided(table.clone())] {
            let dtype = FloatDType::F32;
            assert_parity(
                &name,
                from_ref(&table),
                |i| embed(i[0].clone(), tokens.clone(), dtype),
                |i| plain::embed(i[0].clone(), tokens.clone(), dtype),
            );
            let again = || with_gradients(from_ref(&table), DType::F32, |i| embed(i[0].clone(), tokens.clone(), dtype));
            let [(_, first), (_, second)] = [again(), again()];
            assert_eq!(values(&first[0]), values(&second[0]), "{name}: the same bits every time");
        }
        assert_parity(
            &format!("{name} added"),
            &[random(3, [vocabulary, d_model], &device), random(4, [batch_size * seq_length, d_model], &device)],
            |i| embed_add(i[0].clone(), tokens.clone(), i[1].clone().reshape([batch_size, seq_length, d_model])),
            |i| {
                let x = i[1].clone().reshape([batch_size, seq_length, d_model]);
                x + plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32)
            },
        );
        let first = tokens.clone().slice([0..1]).expand([batch_size, seq_length]);
        for (kind, tokens) in [("transposed", tokens.clone().transpose()), ("repeated", first)] {
            assert_parity(
                &format!("{name} {kind}"),
                &[random(2, [vocabulary, d_model], &device)],
                |i| embed(i[0].clone(), tokens.clone(), FloatDType::F32),
                |i| plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32),
            );
        }
        // A table that is used twice: the second gradient is added to the first. Sorted rows, long
        // chains, and several columns per unit.
        if [63, 513, 1500].contains(&vocabulary) {
            let other = tokens.clone().flip([1]);
            let twice = |i: &[Tensor<Autodiff<B>, 2>]| {
                embed(i[0].clone(), tokens.clone(), FloatDType::F32)
                    * embed(i[0].clone(), other.clone(), FloatDType::F32)
            };
            assert_parity(&format!("{name} twice"), from_ref(&table), twice, |i| {
                plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32)
                    * plain::embed(i[0].clone(), other.clone(), FloatDType::F32)
            });
        }
    }
});

backend_test!(a_table_that_is_used_elsewhere_has_the_gradients_of_all_its_uses::<B>(device) {
    // Rows that Burn pads on some devices, and tables of few and of many tokens.
    for [vocabulary, d_model] in [[700, 96], [600, 288], [140, 40]] {
        let table = random::<B, 2>(1, [vocabulary, d_model], &device);
        let ints = |at: &dyn Fn(usize) -> usize| {
            let values: Vec<i32> = (0..130).map(|i| (at(i) % vocabulary) as i32).collect();
            Tensor::<Autodiff<B>, 1, Int>::from_data(values.as_slice(), &device)
        };
        let (tokens, targets) = (ints(&|i| i * i * 31).reshape([2, 65]), ints(&|i| i * 37));
        let options = HeadLossOptions::new();
        let name = format!("{vocabulary}x{d_model}");
        let as_head = |i: &[Tensor<Autodiff<B>, 2>]| {
            let rows = embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            head_loss(rows, i[0].clone(), targets.clone(), options)
        };
        assert_parity(&format!("the head, {name}"), from_ref(&table), as_head, |i| {
            let rows = plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            plain::head_loss(rows, i[0].clone(), targets.clone(), options)
        });
        if dtype_under_test::<B>(&device) != DType::F32 {
            // Our gradient is f32, and Burn would add a 16-bit one to it without conversion.
            continue;
        }
        let scaled = |i: &[Tensor<Autodiff<B>, 2>]| {
            let rows = embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            rows + (i[0].clone() * 0.5).narrow(0, 0, 130)
        };
        assert_parity(&format!("a factor, {name}"), from_ref(&table), scaled, |i| {
            let rows = plain::embed(i[0].clone(), tokens.clone(), FloatDType::F32).reshape([130, d_model]);
            rows + (i[0].clone() * 0.5).narrow(0, 0, 130)
        });
    }
});

backend_test!(embed_add_and_next_positions_are_what_they_say::<B>(device) {
    let table = random::<B, 2>(1, [7, 12], &device);
    let tokens = integers::<B, 2>(vec![3, 0, 6, 6], [2, 2], &device);
    let x = random::<B, 3>(2, [2, 2, 12], &device);
    let sum = embed_add(table.clone(), tokens.clone(), x.clone());
    assert_close("embed_add", &sum, &(x + embed(table, tokens.clone(), FloatDType::F32)), 1e-6);
    let next: Vec<i64> = next_positions(tokens, 5).into_data().iter::<i64>().collect();
    assert_eq!(next, [4, 1, 5, 5]);
});
