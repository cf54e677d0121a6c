from fizz import fizz

assert [fizz(n) for n in (1, 3, 5, 15, 30, 98)] == ["1", "Fizz", "Buzz", "FizzBuzz", "FizzBuzz", "98"]
